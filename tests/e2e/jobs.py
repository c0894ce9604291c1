# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared, and what each is asked to do."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from ..settings import options
from .release import HAS_RAY_V2

GiB = 1 << 30
BLOCK_TOKENS = 32
BLOCK_BYTES = 64 << 10
"""A KV block of `make_llama` in float32, all ranks together."""
SMALL = 24
"""Device blocks of an engine whose cache overflows; one of them is unused."""

COMMON = {
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "max_model_len": 512,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 512,
}
# Prompts are prefilled in several chunks.
CHUNKED = {"max_num_batched_tokens": 64}
# Grammars and beam search want a tokenizer.
TOKENIZED = {"skip_tokenizer_init": False}

WORKLOADS = [
    "conversations",
    "overcommit",
    "shared_prefix",
    "salts",
    "prompt_logprobs",
    "aborts",
    "reset",
    "reset_while_running",
]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
EAGLE = {"method": "eagle", "model": "eagle", "num_speculative_tokens": 2}
"""`make_eagle` writes the draft model."""

# Asked of engines that guess tokens ahead.
SPECULATED = ["conversations", "overcommit", "shared_prefix", "aborts"]
# Of the module `features`.
FEATURES = [
    "by_priority",
    "structured",
    "beams",
    "paused",
    "reset_running",
    "new_weights",
    "asleep",
]
# Workloads that damage the tier, and the one whose answers they must (not) give.
CONTROLS = {
    "corrupt_slot": "conversations",
    "load_fails": "conversations",
    "load_fails_in_a_crowd": "overcommit",
    "store_fails": "conversations",
    "store_report_is_lost": "conversations",
}
# Workloads whose damage `verify` must notice. They ask what `conversations` asks.
REFUSED = ["nan_slot", "corrupt_slot_refused"]
# What is asked of engines with several ranks, beside the controls: faults that only
# one rank has.
ONE_RANK = {
    "load_fails": "conversations",
    "load_fails_on_the_first_rank": "conversations",
    "store_fails": "conversations",
    "store_fails_on_the_first_rank": "conversations",
}
PARALLEL_WORKLOADS = ["conversations", "overcommit", "shared_prefix", "aborts"]
CORRUPT_EACH_RANK = "corrupt_each_rank"
# What takes some seconds, on engines that the machine has to itself.
BURSTS = ["flood", "thousand_aborts"]


@dataclass
class Job:
    """An engine: `LLM` arguments beside the model, and workloads."""

    llm: dict[str, Any]
    workloads: list[str] = field(default_factory=lambda: WORKLOADS)

    @property
    def num_ranks(self) -> int:
        return self.llm.get("tensor_parallel_size", 1) * self.llm.get(
            "pipeline_parallel_size", 1
        )


def device(num_blocks: int, num_ranks: int = 1, num_stages: int = 1) -> dict[str, Any]:
    """A device cache of `num_blocks` on each of the ranks of each stage."""
    return {
        "kv_cache_memory_bytes": BLOCK_BYTES // (num_ranks * num_stages) * num_blocks,
        # The CPU engines of some releases do not look at the bytes.
        "num_gpu_blocks_override": num_blocks,
        "tensor_parallel_size": num_ranks,
        "pipeline_parallel_size": num_stages,
    }


def tier(num_slots: int, **config: Any) -> dict[str, Any]:
    return {
        "kv_offloading_backend": "core",
        "kv_offloading_size": BLOCK_BYTES * num_slots / GiB,
        # `auto` learns from the workloads before; `test_seen` and others have it.
        "kv_offloading_config": options(**{"store_from_use": 1} | config),
    }


def connector(name: str, **config: Any) -> dict[str, Any]:
    """A KV connector that saves and loads; `STORAGE` is a folder of the job's own."""
    module = {"kv_connector_module_path": "tests.e2e.connectors"}
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "storage": "STORAGE",
            "shared_storage_path": "STORAGE",
        },
        **(module if name == "SlowConnector" else {}),
        **config,
    }


def beside(transfer: dict[str, Any], **config: Any) -> dict[str, Any]:
    """An engine with a tier and a connector. The connector sees whole prompts."""
    return (
        COMMON
        | device(SMALL)
        | tier(300, **config)
        | {"max_num_batched_tokens": 2048, "kv_transfer_config": transfer}
    )


JOBS = {
    # Never evicts, and splits no prompt.
    "large": Job(
        COMMON | TOKENIZED | device(400) | {"max_num_batched_tokens": 2048},
        [
            *WORKLOADS,
            "sampling",
            "served",
            *BURSTS,
            "handed_over",
            "passed_on",
            "tier_load_fails_beside_a_connector",
            *FEATURES,
        ],
    ),
    "small": Job(COMMON | CHUNKED | device(SMALL)),
    "write_back": Job(
        COMMON | device(SMALL) | tier(1000) | {"async_scheduling": True},
        [*WORKLOADS, "sampling", *BURSTS, *CONTROLS],
    ),
    "write_through": Job(
        COMMON
        | device(SMALL)
        | tier(
            70,
            store_policy="write_through",
            eviction_policy="arc",
            # No step waits for loads: they run ahead.
            max_load_stall_ms=0,
        ),
        [*WORKLOADS, "sampling", *BURSTS, *CONTROLS],
    ),
    "write_through_async": Job(
        COMMON
        | CHUNKED
        | device(SMALL)
        | tier(1000, store_policy="write_through")
        | {"async_scheduling": True},
        [*WORKLOADS, *CONTROLS],
    ),
    "write_back_tp2": Job(
        COMMON | CHUNKED | device(SMALL, 2) | tier(70, eviction_policy="arc"),
        [*WORKLOADS, *CONTROLS],
    ),
    "write_through_tp2": Job(
        COMMON | CHUNKED | device(SMALL, 2) | tier(1000, store_policy="write_through"),
        [*WORKLOADS, *CONTROLS],
    ),
    "example_connector": Job(
        beside(connector("ExampleConnector")), ["handed_over", "connector_spoils"]
    ),
    "slow_connector": Job(
        beside(
            connector("SlowConnector", kv_load_failure_policy="recompute"),
            store_policy="write_through",
        ),
        [
            "handed_over",
            "tier_load_fails_beside_a_connector",
            "external_load_fails",
            "connector_spoils",
        ],
    ),
    "two_connectors": Job(
        beside(
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        connector("SlowConnector"),
                        connector("ExampleConnector"),
                    ]
                },
            }
        ),
        ["handed_over", "connector_spoils"],
    ),
    "resized": Job(COMMON | device(SMALL) | tier(400), ["resized", "corrupt_slot"]),
    "features": Job(
        COMMON
        | TOKENIZED
        | device(SMALL)
        | tier(1000)
        | {"scheduling_policy": "priority"},
        [*FEATURES, "sampling", "spoilt_features"],
    ),
    # As without speculation, since all drafts are verified.
    "ngram": Job(
        COMMON | CHUNKED | device(SMALL) | tier(1000) | {"speculative_config": NGRAM},
        [*SPECULATED, "corrupt_slot"],
    ),
    "eagle": Job(
        COMMON
        | CHUNKED
        | tier(1000, store_policy="write_through")
        # The layer of the draft model has blocks too.
        | {
            "kv_cache_memory_bytes": 2 * BLOCK_BYTES * SMALL,
            "num_gpu_blocks_override": SMALL,
            "speculative_config": EAGLE,
        },
        [*SPECULATED, "corrupt_slot"],
    ),
    "lora": Job(
        COMMON
        | device(SMALL)
        | tier(200)
        | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
        ["loras", "lora_reloads", "tenants", "hash_algorithm"],
    ),
    "verify": Job(
        COMMON
        | device(SMALL)
        | tier(1000, verify=True)
        | {"async_scheduling": True, "prefix_caching_hash_algo": "sha256_cbor"},
        ["conversations", "overcommit", "hash_algorithm", *REFUSED],
    ),
}


def parallel(num_ranks: int, num_stages: int, **llm: Any) -> Job:
    return Job(
        COMMON | CHUNKED | device(SMALL, num_ranks, num_stages) | tier(1000) | llm,
        [*PARALLEL_WORKLOADS, *ONE_RANK, CORRUPT_EACH_RANK],
    )


ASKED = os.environ.get("KV_TIER_PARALLEL", "").split(",")
"""For `all` of what takes longest, and for `ray` and `nixl`, which must be installed
first."""
PARALLEL = {"PP=2": parallel(1, 2)}
if "all" in ASKED:
    PARALLEL |= {
        "TP=2": parallel(2, 1),
        "TP=2, async scheduling": parallel(2, 1, async_scheduling=True),
        "TP=2 x PP=2": parallel(2, 2),
    }
if "ray" in ASKED and HAS_RAY_V2:
    PARALLEL["TP=2, Ray"] = parallel(2, 1, distributed_executor_backend="ray")
JOBS |= PARALLEL

TIERED = [name for name in JOBS if name.startswith("write_")]
WITH_RANKS = pytest.mark.skipif("all" not in ASKED, reason="needs KV_TIER_PARALLEL=all")
"""Of what takes minutes, and differs from others by its ranks only."""


def marks_of(name: str, *others: str) -> list[pytest.MarkDecorator]:
    """Of a test that reads the results of an engine, and of others beside it."""
    marks = [pytest.mark.engines(*others, name)]
    # Stores at once and several ranks are each in another engine as well.
    return [*marks, WITH_RANKS] if name == "write_through_tp2" else marks
