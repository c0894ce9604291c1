# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which block lies where, and what the next plan copies.

Nothing here imports torch, does I/O or waits, except for the thread that asks stores
and short waits of steps that run nothing. Each module owns one state. The block pool
calls them in the order of a step.
"""
