# SPDX-License-Identifier: Apache-2.0
"""Memory on both ends of a copy: device regions and host slots. No order, no policy."""
