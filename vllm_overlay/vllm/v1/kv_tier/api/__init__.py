# SPDX-License-Identifier: Apache-2.0
"""Hints in the words of HTTP APIs and of upstream, in the process that serves them."""
