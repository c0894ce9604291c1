# SPDX-License-Identifier: Apache-2.0
"""Secondary tiers on the scheduler's side: what is written to them, and read back."""
