# SPDX-License-Identifier: Apache-2.0
"""The tier beside the programs of others: routers, containers, clusters."""
