# SPDX-License-Identifier: Apache-2.0
"""Where KV lies below the host: bytes under keys, beyond the life of an engine."""
