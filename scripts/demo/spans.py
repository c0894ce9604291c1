# SPDX-License-Identifier: Apache-2.0
"""What the recorder and those who read it agree on."""

SPANS = "KV_TIER_DEMO_SPANS"
"""Environment variable: the file that the recorder writes."""
