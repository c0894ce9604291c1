# SPDX-License-Identifier: Apache-2.0
"""What a host tier of some size would have done for a trace of requests."""
