# SPDX-License-Identifier: Apache-2.0
"""Changes the size of the host tier of running engines.

It goes to every engine, each of which has a tier of the configured size.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from vllm.v1.kv_tier.hints.conversation_api import tell_all
from vllm.v1.kv_tier.hints.http import refusal
from vllm.v1.kv_tier.hints.schema import MAX_HINT, shown

GiB = 1 << 30
PATH = "/v1/kv_tier/host_size"


def check(given: object, vllm_config: Any) -> dict[str, int]:
    """Check a new size.

    Args:
        given: `{"gib": number}`.
        vllm_config: Settings of the engine, which has the tier.

    Returns:
        What to send to the engines.

    Raises:
        ValueError: It is not a size that the engine can have. The message has the
            value and the fix.

    """
    reserved_gib = vllm_config.cache_config.kv_offloading_size
    if reserved_gib is None:
        raise ValueError(
            "The host memory of this engine is a part of a pool, whose size is fixed. "
            "Start the keeper with another --size."
        )
    if not isinstance(given, Mapping) or [*given] != ["gib"]:
        raise ValueError(f'The body must be {{"gib": number}}, got {shown(given)}.')
    gib = given["gib"]
    if isinstance(gib, bool) or not isinstance(gib, int | float):
        raise ValueError(f"gib must be a number, got {shown(gib)}.")
    if not 0 < gib <= reserved_gib:
        raise ValueError(
            f"gib must be above 0 and at most {reserved_gib:g}, which the engine "
            f"reserved at its start (--kv-offloading-size), got {gib:g}."
        )
    return {"host_bytes": int(gib * GiB)}


def answer(found: dict[str, int]) -> dict[str, int]:
    """The answer of engines.

    Raises:
        ValueError: They refused.

    """
    if found.pop("refused", 0):
        raise ValueError(
            "The host size cannot change with share_replicas, since several ranks map "
            "the memory. Start the engine without it, or with another "
            "--kv-offloading-size."
        )
    return found


async def serve_host_size(request: Request) -> JSONResponse:
    """Handle a change of the host size. The body is `{"gib": number}`.

    The answer has the slots that the tiers should have, and those that they have now,
    of all engines together.
    """
    client = request.app.state.engine_client
    try:
        body = await request.body()
        if len(body) > MAX_HINT:
            raise ValueError(f"The body must be short, got {len(body)} bytes.")
        said = check(msgspec.json.decode(body), client.vllm_config)
        return JSONResponse(answer(await tell_all(client, said)))
    except (ValueError, RecursionError) as e:
        return refusal(PATH, str(e))
