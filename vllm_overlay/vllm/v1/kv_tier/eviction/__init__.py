# SPDX-License-Identifier: Apache-2.0
"""Which host slot makes room: an order over keys, one module for each policy."""
