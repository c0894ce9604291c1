# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks tell apart what a prompt with embeddings takes at each position."""

import importlib
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch

from tests.sim import upstream
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads
from vllm.v1.request import Request

from ..names import init_none_hash, sha256

BLOCK, LENGTH = 4, 9
EMBEDDINGS = torch.arange(2.0 * LENGTH, dtype=torch.float16).reshape(LENGTH, 2)

embeds = pytest.mark.skipif(
    not hasattr(kv_cache_utils, "embeds_keys"),
    reason="this release has no prefix cache for prompt embeddings",
)


@pytest.fixture(autouse=True)
def tier() -> Iterator[None]:
    init_none_hash(sha256)
    set_adapter_loads(AdapterLoads())
    yield
    set_adapter_loads(None)


def keys(
    takes_ids: list[bool] | None = None,
    ids: list[int] | None = None,
    embeddings: torch.Tensor = EMBEDDINGS,
) -> list[BlockHash]:
    more: dict[str, Any] = {}
    if takes_ids is not None:
        if "prompt_is_token_ids" not in signature(Request).parameters:
            pytest.skip("prompts of this release do not mix ids and embeddings")
        more["prompt_is_token_ids"] = takes_ids
        ids = [0] * LENGTH
    request = upstream.make_request(
        request_id="r",
        prompt_token_ids=ids,
        prompt_embeds=embeddings,
        sampling_params=SamplingParams(max_tokens=20),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **more,
    )
    return list(request.block_hashes)


def takes_ids(*positions: int) -> list[bool]:
    return [position in positions for position in range(LENGTH)]


@embeds
def test_a_position_that_takes_an_id_changes_the_keys_from_its_block_on() -> None:
    none, first, second = keys(takes_ids()), keys(takes_ids(1)), keys(takes_ids(5))
    assert none[0] == second[0] != first[0]
    assert len({none[1], first[1], second[1]}) == 3
    assert keys(takes_ids(1)) == first != keys(takes_ids(2))
    # Of no full block.
    assert keys(takes_ids(LENGTH - 1)) == none


@embeds
def test_prompts_without_a_mask_differ_by_what_else_they_have() -> None:
    assert not set(keys()) & set(keys(ids=[0] * LENGTH))
    assert not set(keys()) & set(keys(takes_ids(0)))


@embeds
def test_bytes_of_another_type_are_other_embeddings() -> None:
    assert not set(keys()) & set(keys(embeddings=EMBEDDINGS.view(torch.bfloat16)))
    assert keys() == keys(embeddings=EMBEDDINGS.clone())


@embeds
def test_without_a_tier_keys_are_those_of_upstream() -> None:
    """The control: which are the same whatever the mask."""
    with_tier = keys(takes_ids(1))
    set_adapter_loads(None)
    assert keys(takes_ids()) == keys(takes_ids(1)) != with_tier


def image(where: PlaceholderRange) -> dict[str, Any]:
    if "mm_features" not in signature(Request).parameters:
        return {
            "multi_modal_hashes": ["a"],
            "multi_modal_placeholders": [where],
            "multi_modal_inputs": [None],
        }
    inputs: Any = importlib.import_module("vllm.multimodal.inputs")
    feature = inputs.MultiModalFeatureSpec(
        data=None, modality="image", identifier="a", mm_position=where
    )
    return {"mm_features": [feature]}


def test_keys_have_where_in_a_block_an_image_begins() -> None:
    """Older releases have the bare identifier."""

    def image_keys(offset: int) -> list[BlockHash]:
        return list(
            upstream.make_request(
                request_id="r",
                prompt_token_ids=[7] * LENGTH,
                sampling_params=SamplingParams(max_tokens=20),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
                **image(PlaceholderRange(offset=offset, length=2)),
            ).block_hashes
        )

    assert len({image_keys(offset)[0] for offset in range(2)}) == 2
    assert image_keys(1) == image_keys(1)
