# SPDX-License-Identifier: Apache-2.0
"""One pool for the engines of a machine: who owns its memory, and who may read it."""
