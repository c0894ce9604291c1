# SPDX-License-Identifier: Apache-2.0
"""Which inputs of a block are embeddings, and where, for its key: a door.

A prompt may mix token ids with embeddings. Upstream's keys have the ids of all
positions (0 where there is none) and the bytes of all embeddings, but neither which of
the two a position takes nor the type of the bytes. Keys of older releases omit where in
a block an image begins.
"""

from typing import TYPE_CHECKING

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.adapters import loads_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


def embeds_keys(request: "Request", start: int, end: int) -> list[tuple[str, str]]:
    """What the key of a block of a request with embeddings must have in addition.

    Args:
        request: It has `prompt_embeds`.
        start: First position that the key covers.
        end: The position after the last one.

    """
    if loads_of(request) is None:
        return []
    assert request.prompt_embeds is not None
    takes_ids = releases.token_id_mask(request)
    if takes_ids is not None:
        where = "".join("01"[bool(is_id)] for is_id in takes_ids[start:end])
    else:
        # With ids and no mask, model runners differ in what they take.
        where = "embeddings" if request.prompt_token_ids is None else "both"
    return [("prompt embeds", f"{request.prompt_embeds.dtype} {where}")]


def mm_key(
    request: "Request", identifier: str, offset: int
) -> str | tuple[str, str, int]:
    """What a block's key has of an image or the like, where upstream's has the bare
    identifier.

    Args:
        request: It has the image.
        identifier: Of the image.
        offset: Of its begin in the block; negative if it began before.

    """
    return identifier if loads_of(request) is None else ("mm", identifier, offset)
