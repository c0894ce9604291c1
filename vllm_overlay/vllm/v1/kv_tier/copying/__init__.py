# SPDX-License-Identifier: Apache-2.0
"""What moves bytes between device blocks and host slots, and which engine does what."""
