# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: they order keys, and so decide which host slot is reused."""
