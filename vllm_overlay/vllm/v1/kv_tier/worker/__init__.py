# SPDX-License-Identifier: Apache-2.0
"""How a rank carries out plans: the order of its copies, and what it reports."""
