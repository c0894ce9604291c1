# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which block lies where, and what the next plan copies.

Nothing here does I/O or waits. Each module owns one state; the block pool,
`block_pool`, asks them in the order that a step has.
"""
