# SPDX-License-Identifier: Apache-2.0
"""Copies between device blocks and host slots: the engines, and how one is chosen."""
