# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/patchtool on an upstream of a few files."""
