# SPDX-License-Identifier: Apache-2.0
"""KV cache layers of models in production, and upstream's groups of them.

Only what shapes KV: a layer is a spec with the numbers of the model's config.json, in
bf16 and for one rank, so no weights are needed. Upstream's own planning of the
installed release makes groups and blocks of them.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

SlidingWindowMLASpec: Any = kv_cache_interface.SlidingWindowMLASpec
_BF16, _F32, _U8 = torch.bfloat16, torch.float32, torch.uint8
BATCHED_TOKENS = 8192


def _full(heads: int, size: int, block: int = 16) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=_BF16
    )


def _window(heads: int, size: int, window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=16,
        num_kv_heads=heads,
        head_size=size,
        dtype=_BF16,
        sliding_window=window,
    )


def _mla(size: int = 576, block: int = 64) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=size, dtype=_BF16
    )


def _state(page: int, block: int, *shapes: tuple[tuple[int, ...], Any]) -> KVCacheSpec:
    """`page`: bytes of a block of attention, which a state fills up."""
    return MambaSpec(
        block_size=block,
        shapes=tuple(shape for shape, _ in shapes),
        dtypes=tuple(dtype for _, dtype in shapes),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def _with_states(
    num_full: int, num_states: int, full: KVCacheSpec, *shapes: tuple[Any, Any]
) -> list[KVCacheSpec]:
    """As upstream does: blocks of attention become as large as a state."""
    of_token = full.page_size_bytes // full.block_size
    state = sum(math.prod(s) * torch.finfo(d).bits // 8 for s, d in shapes)
    block = -(-state // of_token // 16) * 16
    page = block * of_token
    fulls = num_full * [replace(full, block_size=block)]
    return [*fulls, *num_states * [_state(page, block, *shapes)]]


def _mixed(
    each: int, last: int, full: KVCacheSpec, windows: KVCacheSpec
) -> list[KVCacheSpec]:
    """`last` layers, of which each n-th is of full attention."""
    return [full if i % each == each - 1 else windows for i in range(last)]


def _deepseek_v4(num_layers: int, head: int = 512) -> list[KVCacheSpec]:
    """Windows, compressed keys, states of compressors, keys of indexers."""
    v4: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1}
    packed: dict[str, Any] = {
        "dtype": _U8,
        "state_content_bytes": 584,
        "alignment": 576,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }

    def compressor(block: int, window: int, size: int) -> KVCacheSpec:
        return SlidingWindowMLASpec(
            **v4, block_size=block, head_size=size, dtype=_F32, alignment=576,
            sliding_window=window,
        )  # fmt: skip

    def main(ratio: int) -> KVCacheSpec:
        return MLAAttentionSpec(
            **v4, **packed, block_size=256, head_size=head, tokens_per_state=ratio
        )

    window = SlidingWindowMLASpec(
        **v4, **packed, block_size=64, head_size=head, sliding_window=128
    )
    index = MLAAttentionSpec(
        **v4, block_size=256, head_size=132, dtype=_U8, tokens_per_state=4,
        alignment=576,
    )  # fmt: skip
    c4 = [window, main(4), compressor(4, 8, 2048), index, compressor(4, 8, 512)]
    c128 = [window, main(128), compressor(8, 128, 1024)]
    layers = [window, window]
    for i in range(num_layers - 2):
        layers += c128 if i % 2 else c4
    return layers


@dataclass(frozen=True)
class Shape:
    """Layers with KV of a model."""

    name: str
    specs: tuple[KVCacheSpec, ...]
    layout: str = "LBHNC"
    """How upstream lays blocks out; BLHNC where pages differ in size."""


def _shapes() -> Iterator[Shape]:
    def shape(name: str, specs: list[KVCacheSpec], layout: str = "LBHNC") -> Shape:
        return Shape(name, tuple(specs), layout)

    yield shape("Gemma-3-27B", _mixed(6, 62, _full(16, 128), _window(16, 128, 1024)))
    yield shape("Gemma-3-12B", _mixed(6, 48, _full(8, 256), _window(8, 256, 1024)))
    gemma4 = _mixed(6, 60, _full(4, 512), _window(16, 256, 1024))
    yield shape("Gemma-4-31B", gemma4, "BLHNC")
    yield shape("gpt-oss-120b", _mixed(2, 36, _full(8, 64), _window(8, 64, 128)))
    yield shape("gpt-oss-20b", _mixed(2, 24, _full(8, 64), _window(8, 64, 128)))
    gdn = ((3, 8192), _BF16), ((32, 128, 128), _F32)
    yield shape("Qwen3-Next-80B", _with_states(12, 36, _full(2, 256), *gdn))
    gdn = ((3, 12288), _BF16), ((64, 128, 128), _F32)
    yield shape("Qwen3.5-397B", _with_states(15, 45, _full(2, 256), *gdn))
    yield shape("DeepSeek-V4-Flash", _deepseek_v4(43), "BLHNC")
    yield shape("DeepSeek-V4-Pro", _deepseek_v4(61), "BLHNC")
    chunk = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=_BF16,
        attention_chunk_size=8192,
    )  # fmt: skip
    yield shape("Llama-4-Scout", _mixed(4, 48, _full(8, 128), chunk))
    yield shape("Command-A", _mixed(4, 64, _full(8, 128), _window(8, 128, 4096)))
    yield shape("OLMo-3-32B", _mixed(4, 64, _full(8, 128), _window(8, 128, 4096)))
    yield shape("EXAONE-4-32B", _mixed(4, 64, _full(8, 128), _window(8, 128, 4096)))
    yield shape("MiMo-V2-Flash", _mixed(6, 48, _full(4, 192), _window(8, 192, 128)))
    mamba2 = ((3, 10240), _BF16), ((128, 64, 128), _F32)
    yield shape("Nemotron-H-47B", _with_states(5, 44, _full(8, 128), *mamba2))
    mamba2 = ((3, 8448), _BF16), ((128, 64, 128), _F32)
    yield shape("Granite-4-H-Small", _with_states(4, 36, _full(8, 128), *mamba2))
    kda = ((9, 4096), _BF16), ((32, 128, 128), _F32)
    yield shape("Kimi-Linear-48B", _with_states(7, 20, _mla(576, 16), *kda))
    conv = ((2, 2048), _BF16)
    yield shape("LFM2-8B", _with_states(6, 18, _full(8, 64), conv))
    yield shape("DeepSeek-V3", 61 * [_mla()])
    yield shape("Llama-3.1-8B", 32 * [_full(8, 128)])


SHAPES = tuple(_shapes())


@dataclass(frozen=True)
class Planned:
    """What upstream makes of a shape."""

    vllm_config: VllmConfig
    of_rank: KVCacheConfig
    kv_cache_config: KVCacheConfig
    """The scheduler's."""
    block_size: int
    """Tokens of which all groups have whole blocks."""
    hash_size: int
    """Tokens of a hash."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block of all layers."""
        size = max(tensor.size for tensor in self.of_rank.kv_cache_tensors)
        return size // self.of_rank.num_blocks

    def group_bytes(self) -> list[int]:
        """Bytes that a block of each group needs."""
        return [
            sum(_spec_of(group.kv_cache_spec, name).page_size_bytes for name in names)
            for group in self.of_rank.kv_cache_groups
            if (names := group.layer_names)
        ]


def _spec_of(spec: Any, layer: str) -> KVCacheSpec:
    each = getattr(spec, "kv_cache_specs", None)
    return each[layer] if each else spec


def plan(shape: Shape, max_model_len: int) -> Planned:
    """Groups and blocks of `shape`, with a device cache for two prompts."""
    with tempfile.TemporaryDirectory() as folder:
        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": max_model_len,
            "vocab_size": 1 << 17,
        }
        (Path(folder) / "config.json").write_text(json.dumps(model))
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True)
    block_size = max(spec.block_size for spec in shape.specs)
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
    )
    config.cache_config.kv_cache_layout = shape.layout
    config.cache_config.mamba_cache_mode = "align"
    single_type_kv_cache_manager.register_all_kvcache_specs(config)
    specs = {f"model.layers.{i}.attn": spec for i, spec in enumerate(shape.specs)}
    groups = get_global_kv_cache_groups(config, [specs])
    num_blocks = 64 + sum(_num_blocks(g.kv_cache_spec, max_model_len) for g in groups)
    config.cache_config.num_gpu_blocks_override = num_blocks
    (planned,) = get_kv_cache_configs(config, [specs], [1 << 50], groups)
    config.cache_config.num_gpu_blocks = planned.num_blocks
    of_scheduler = generate_scheduler_kv_cache_config([planned])
    sizes = resolve_kv_cache_block_sizes(of_scheduler, config)
    return Planned(config, planned, of_scheduler, *sizes)


def _num_blocks(spec: Any, num_tokens: int) -> int:
    """Device blocks of a group that a request can hold at once."""
    each = getattr(spec, "kv_cache_specs", None)
    spec = next(iter(each.values())) if each else spec
    if isinstance(spec, MambaSpec):
        return 8
    window = getattr(spec, "sliding_window", None)
    if window is not None:
        num_tokens = min(num_tokens, window + 2 * BATCHED_TOKENS)
    return -(-num_tokens // spec.block_size) + 2
