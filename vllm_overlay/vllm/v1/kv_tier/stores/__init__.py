# SPDX-License-Identifier: Apache-2.0
"""Stores of secondary tiers: bytes under keys, which outlive an engine."""
