# SPDX-License-Identifier: Apache-2.0
"""Adds to block keys which positions take embeddings, and where images begin.

A prompt may mix token ids and embeddings. Upstream's keys contain the ids of all
positions (0 where there is none) and the bytes of all embeddings, but not which of them
a position takes, nor the type of the bytes. Keys of older releases lack the offset of
an image in its block.
"""

from typing import TYPE_CHECKING

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.adapters import loads_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


def embeds_keys(request: "Request", start: int, end: int) -> list[tuple[str, str]]:
    """Additional parts of the key of a block of a request with embeddings.

    Args:
        request: A request with `prompt_embeds`.
        start: First position of the block.
        end: Position after its last one.

    """
    if loads_of(request) is None:
        return []
    assert request.prompt_embeds is not None
    takes_ids = releases.token_id_mask(request)
    if takes_ids is not None:
        where = "".join("01"[bool(is_id)] for is_id in takes_ids[start:end])
    else:
        # With both and no mask, releases differ in which one the model takes.
        where = "embeddings" if request.prompt_token_ids is None else "both"
    return [("prompt embeds", f"{request.prompt_embeds.dtype} {where}")]


def mm_key(
    request: "Request", identifier: str, offset: int
) -> str | tuple[str, str, int]:
    """The part of a block's key for an image or similar input.

    Upstream uses the bare identifier.

    Args:
        request: The request with the image.
        identifier: Identifier of the image.
        offset: Offset of its beginning in the block; negative if it began earlier.

    """
    return identifier if loads_of(request) is None else ("mm", identifier, offset)
