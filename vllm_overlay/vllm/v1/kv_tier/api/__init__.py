# SPDX-License-Identifier: Apache-2.0
"""Parses hints of HTTP APIs and of upstream, in the process that serves requests."""
