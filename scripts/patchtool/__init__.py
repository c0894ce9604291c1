# SPDX-License-Identifier: Apache-2.0
"""Keeps the patch series, the overlay and what is built from them."""
