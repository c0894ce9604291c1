# SPDX-License-Identifier: Apache-2.0
"""Where KV lies below the host: bytes under keys, beyond the life of an engine.

Redis and Mooncake are plugins: nothing imports them but `settings`, by name.
"""
