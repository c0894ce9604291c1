# SPDX-License-Identifier: Apache-2.0
"""Features that can meet in an engine with the tier, and how each is switched on.

`refusals` runs the checks of an engine's start with two of them, the simulator draws
them (`tests/sim/test_pairs.py`), real engines have many (`tests/e2e/test_pairs.py`),
and `scripts/pairs.py` makes the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One of them."""

    code: str
    """In the table."""
    name: str
    llm: Mapping[str, Any] = field(default_factory=dict)
    """`EngineArgs` that switch it on."""
    tier: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `--kv-offloading-config` that do."""
    path: tuple[str, str, Any] | None = None
    """Section of the engine's config, field and value, where no CPU has it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the parameters of a request that do. Whoever samples has
    `SamplingParams`, a pooling model `PoolingParams`."""


def _hint(**hints: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_tier": hints}}}


_REDIS = {"type": "redis", "url": "redis://127.0.0.1:6379"}
_SPECULATES = {"num_speculative_tokens": 2}

FEATURES = [
    Feature("WB", "`write_back`", tier={"store_policy": "write_back"}),
    Feature("WT", "`write_through`", tier={"store_policy": "write_through"}),
    Feature("VE", "`verify`", tier={"verify": True}),
    Feature(
        "FS",
        "files",
        tier={"secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 1}]},
    ),
    Feature("RD", "Redis, Valkey", tier={"secondary_tiers": [_REDIS]}),
    Feature(
        "MC",
        "Mooncake",
        tier={"secondary_tiers": [{"type": "mooncake", "master": "127.0.0.1:50051"}]},
    ),
    Feature(
        "SH",
        "`share_replicas`",
        {"tensor_parallel_size": 2},
        tier={"share_replicas": True},
    ),
    Feature("QU", "quotas", tier={"quotas": {"a": 0.5}}),
    Feature("RL", "hint `release`", sampling=_hint(conversation="c", release=True)),
    Feature("RT", "hint `retain`", sampling=_hint(retain=[{"priority": 80}])),
    Feature("PW", "hint `prewarm`", sampling=_hint(prewarm=True)),
    Feature("TN", "hint `tenant`", sampling=_hint(tenant="a")),
    Feature(
        "CA",
        "hints `store`, `max_load_tokens`, `max_offload_tokens`",
        sampling=_hint(store=False, max_load_tokens=64, max_offload_tokens=64),
    ),
    Feature("EL", "`shrink_after_s`", tier={"shrink_after_s": 1.0}),
    Feature("LO", "LoRA", {"enable_lora": True, "max_lora_rank": 8}),
    Feature("LR", "LoRA, reloaded", {"enable_lora": True, "max_lora_rank": 8}),
    Feature(
        "NG",
        "ngram speculation",
        {
            "speculative_config": {"method": "ngram", "prompt_lookup_max": 3}
            | _SPECULATES
        },
    ),
    Feature(
        "EA",
        "EAGLE, MTP",
        {"speculative_config": {"method": "eagle"} | _SPECULATES},
    ),
    Feature("SW", "sliding window"),
    Feature("MB", "Mamba"),
    Feature("CL", "chunked local attention"),
    Feature("ML", "MLA"),
    Feature("PB", "hits inside of blocks"),
    Feature("PE", "prompt embeddings", {"enable_prompt_embeds": True}),
    Feature(
        "RE",
        "routed experts",
        path=("aux_output_config", "enable_return_routed_experts", True),
    ),
    Feature("NN", "`n` > 1", sampling={"n": 2}),
    Feature("PL", "prompt logprobs", sampling={"prompt_logprobs": 1}),
    Feature("MM", "images"),
    Feature(
        "PD",
        "KV connector",
        {
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "fail",
            }
        },
    ),
    Feature("TP", "tensor parallel", {"tensor_parallel_size": 2}),
    Feature("PP", "pipeline parallel", {"pipeline_parallel_size": 2}),
    Feature("DP", "data parallel", {"data_parallel_size": 2}),
    Feature(
        "DC",
        "decode context parallel",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ),
    Feature(
        "PC",
        "prefill context parallel",
        path=("parallel_config", "prefill_context_parallel_size", 2),
    ),
    Feature("EV", "KV events", {"kv_events_config": {"enable_kv_cache_events": True}}),
    Feature("PO", "pooling", {"runner": "pooling"}),
    Feature("OP", "one pool", tier={"pool": "/run/kvtier/pool.sock"}),
]

BY_CODE = {feature.code: feature for feature in FEATURES}
CODES = [feature.code for feature in FEATURES]

Pair = tuple[str, str]
PAIRS: list[Pair] = list(combinations(CODES, 2))
