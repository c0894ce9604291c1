# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors cannot be combined with the tier."""

from typing import Any


def offloading_claim(transfer: Any) -> str | None:
    """Name of a configured connector that offloads to host memory, if any.

    Args:
        transfer: Upstream's `KVTransferConfig`.

    """
    names = [transfer.kv_connector]
    extra = transfer.kv_connector_extra_config or {}
    names += [c.get("kv_connector") for c in extra.get("connectors", [])]
    for name in names:
        if name and ("Offload" in name or "LMCache" in name):
            return name
    return None
