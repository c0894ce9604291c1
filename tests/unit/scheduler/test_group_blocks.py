# SPDX-License-Identifier: Apache-2.0
"""Blocks that a prompt takes, by what each kind of layers keeps of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_tier.scheduler.kv_groups import group_blocks, tokens_per_block

LENGTH = 131_072

if not hasattr(kv_cache_interface, "ChunkedLocalAttentionSpec"):
    pytest.skip("has no chunked local attention", allow_module_level=True)


def attention(kind: Any, **more: int) -> Any:
    return kind(
        **{"block_size": 16, "num_kv_heads": 1, "head_size": 8} | more,
        dtype=torch.float16,
    )


FULL = attention(FullAttentionSpec)
WINDOW = attention(SlidingWindowSpec, sliding_window=512)
CHUNK = attention(
    kv_cache_interface.ChunkedLocalAttentionSpec, attention_chunk_size=8192
)
MAMBA = MambaSpec(
    block_size=1024, shapes=((8,),), dtypes=(torch.float16,), num_speculative_blocks=0
)


def tokens(*specs: Any, **parallel: int) -> float:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(max_model_len=LENGTH),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return tokens_per_block(
        group_blocks(config, SimpleNamespace(kv_cache_groups=groups))
    )


@pytest.mark.parametrize(
    "specs, num_blocks",
    [
        ([FULL], 8192),
        ([FULL, FULL], 2 * 8192),
        # A window that all blocks are kept for.
        ([attention(FullAttentionSpec, sliding_window=512)], 8192),
        # As Gemma 3: five groups of windows.
        ([FULL, *5 * [WINDOW]], 8192 + 5 * 33),
        ([FULL, CHUNK], 8192 + 512),
        ([attention(FullAttentionSpec, block_size=1024), *3 * [MAMBA]], 128 + 3),
        # A window larger than the prompt.
        ([attention(SlidingWindowSpec, sliding_window=2 * LENGTH)], 8192),
    ],
)
def test_a_hit_needs_the_end_of_windows_and_states(
    specs: list[Any], num_blocks: int
) -> None:
    assert tokens(*specs) == pytest.approx(LENGTH / num_blocks)


def test_ranks_share_the_tokens_of_a_block() -> None:
    assert tokens(FULL, decode_context_parallel_size=4) == 64
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=2, prefill_context_parallel_size=2
        ),
        model_config=SimpleNamespace(max_model_len=LENGTH),
    )
    # Later releases share them in decode only.
    is_later = hasattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    (group,) = group_blocks(config, groups)
    assert group.block_size == (32 if is_later else 64)
