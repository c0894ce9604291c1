# SPDX-License-Identifier: Apache-2.0
"""The worker's side: runs the copies of plans, and reports to the scheduler."""
