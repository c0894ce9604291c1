# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold the same KV, who stores for them, and what a size gives then."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.worker.sharing import (
    head_replicas,
    held_once,
    kv_replicas,
    obstacle,
    owners,
    why_no_replicas,
)


def settings(num_ranks: int, use_mla: bool = False, **others: Any) -> Any:
    names = "decode_context_parallel_size", "prefill_context_parallel_size"
    parallel = {name: others.pop(name) for name in names if name in others}
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks, **parallel),
        **{"speculative_config": None, **others},
    )


def told(replicas: int | None, *kinds: str, **spec: Any) -> Any:
    """A `KVCacheConfig` that tells, or one of a release that does not."""
    groups = [
        SimpleNamespace(kv_cache_spec=type(kind, (SimpleNamespace,), {})(**spec))
        for kind in kinds
    ]
    found = SimpleNamespace(kv_cache_groups=groups)
    if replicas is not None:
        found.kv_tp_replicas = replicas
    return found


@pytest.mark.parametrize("replicas, num_ranks", [(2, 2), (2, 4), (8, 8)])
def test_releases_that_tell_are_believed(replicas: int, num_ranks: int) -> None:
    assert kv_replicas(settings(num_ranks), told(replicas)) == replicas


def test_what_is_no_group_of_ranks_counts_as_none() -> None:
    assert kv_replicas(settings(4), told(3)) == 1


def test_one_rank_looks_at_nothing() -> None:
    assert kv_replicas(settings(1), None) == 1


@pytest.mark.parametrize(
    "others",
    [
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {
            "speculative_config": SimpleNamespace(
                draft_parallel_config=SimpleNamespace(tensor_parallel_size=1)
            )
        },
    ],
)
def test_ranks_that_may_differ(others: dict[str, Any]) -> None:
    assert kv_replicas(settings(2, **others), told(2)) == 1


MLA, FULL, WINDOW = "MLAAttentionSpec", "FullAttentionSpec", "SlidingWindowSpec"


@pytest.mark.parametrize(
    "num_ranks, kinds, spec, expected",
    [
        (2, [MLA], {}, 2),
        (8, [MLA, MLA], {}, 8),
        # The first releases have one spec for both, and a flag.
        (2, [FULL], {"use_mla": True}, 2),
        (2, [FULL], {"use_mla": False}, 1),
        # Kimi-Linear: states differ from rank to rank.
        (2, [MLA, "MambaSpec"], {}, 1),
        (2, [], {}, 1),
    ],
)
def test_mla_in_releases_that_do_not_tell(
    num_ranks: int, kinds: list[str], spec: dict[str, Any], expected: int
) -> None:
    config = told(None, *kinds, **spec)
    assert kv_replicas(settings(num_ranks, use_mla=True), config) == expected
    drafted = settings(
        num_ranks,
        use_mla=True,
        speculative_config=SimpleNamespace(draft_parallel_config=None),
    )
    assert kv_replicas(drafted, config) == 1


def test_a_release_that_tells_of_mla_is_believed_if_it_says_no() -> None:
    assert kv_replicas(settings(2, use_mla=True), told(1, MLA)) == 1


DRAFTER = SimpleNamespace(draft_parallel_config=None)


@pytest.mark.parametrize(
    "num_ranks, others, reason",
    [
        (2, {"decode_context_parallel_size": 2}, "KV of different tokens"),
        (
            2,
            {
                "speculative_config": SimpleNamespace(
                    draft_parallel_config=SimpleNamespace(tensor_parallel_size=1)
                )
            },
            "another number of ranks",
        ),
        (1, {}, "pipeline stages"),
        (2, {}, "no two ranks"),
        # A GQA draft model of an MLA model; states beside MLA.
        (8, {"use_mla": True, "speculative_config": DRAFTER}, "of its draft model"),
        (8, {"use_mla": True}, "of its other layers"),
    ],
)
def test_one_message_says_why_nothing_is_shared(
    num_ranks: int, others: dict[str, Any], reason: str
) -> None:
    config = settings(num_ranks, **others)
    assert kv_replicas(config, told(1, MLA, FULL, num_kv_heads=4)) == 1
    assert reason in why_no_replicas(config)


@pytest.mark.parametrize("says", [None, 1])
@pytest.mark.parametrize(
    "kinds, num_heads, expected",
    [
        ([FULL], 1, None),
        ([FULL, WINDOW], 1, None),
        ([FULL], 2, 1),
        ([FULL, "MambaSpec"], 1, 1),
        ([], 1, 1),
    ],
)
def test_ranks_are_asked_where_each_has_one_head(
    says: int | None, kinds: list[str], num_heads: int, expected: int | None
) -> None:
    """Nobody tells the scheduler's side whether it is the same one."""
    config = told(says, *kinds, num_kv_heads=num_heads)
    assert kv_replicas(settings(4), config) == expected


def model(*replicas: int) -> dict[str, Any]:
    """Modules of a model with a layer each."""
    found: dict[str, Any] = {"": object(), "model": object()}
    for i, num in enumerate(replicas):
        found[f"layers.{i}.self_attn"] = object()
        found[f"layers.{i}.self_attn.qkv_proj"] = SimpleNamespace(
            num_kv_head_replicas=num
        )
        found[f"layers.{i}.self_attn.attn"] = object()
    return found


LAYERS = ["layers.0.self_attn.attn", "layers.1.self_attn.attn"]


@pytest.mark.parametrize(
    "replicas, expected",
    [
        # Two heads on four ranks.
        ((2, 2), 2),
        ((4, 4), 4),
        # Layers of two sizes: what both have in common.
        ((4, 2), 2),
        ((2, 1), 1),
        # A layer whose projection is another one, or none.
        ((2,), 1),
        ((), 1),
    ],
)
def test_layers_say_on_how_many_ranks_their_heads_are(
    replicas: tuple[int, ...], expected: int
) -> None:
    assert head_replicas(model(*replicas), LAYERS) == expected


def test_a_model_without_kv_has_nothing_in_common() -> None:
    assert head_replicas(model(2, 2), []) == 1


@pytest.mark.parametrize(
    "num_ranks, replicas, expected",
    [
        (2, 2, [0, 0]),
        (4, 2, [0, 0, 2, 2]),
        # Two stages of two ranks each.
        (4, 4, [0, 0, 0, 0]),
        (2, 1, [0, 1]),
    ],
)
def test_the_first_of_a_group_stores(
    num_ranks: int, replicas: int, expected: Sequence[int]
) -> None:
    ranks = range(num_ranks)
    assert list(owners(ranks, replicas)) == list(zip(ranks, expected))


def test_what_is_held_once_takes_its_bytes_once() -> None:
    """MLA with two ranks has twice the slots of the same size, and so has GQA with two
    heads on four ranks."""
    assert held_once([100, 100], 2) == held_once([100, 100], 1) / 2
    assert held_once([100] * 4, 2) == held_once([100] * 4, 1) / 2
    # Stages of a pipeline have layers of their own.
    assert held_once([100, 100, 70, 70], 2) == 170


@pytest.mark.parametrize(
    "layouts, replicas, one_machine, below, reason",
    [
        ([(8, 8), (8, 8)], 2, True, False, None),
        ([(8, 8), (8, 8), (4,), (4,)], 2, True, False, None),
        ([(8, 8), (8, 8)], 2, False, False, "several machines"),
        ([(8, 8), (8, 8)], 2, True, True, "into its own slots"),
        ([(8, 8), (16,)], 2, True, False, "different layouts"),
        ([(8,), (8,), (8,)], 2, True, False, "3 ranks do not divide into groups of 2"),
        ([(), ()], 2, True, False, "no KV memory"),
    ],
)
def test_why_ranks_have_their_own(
    layouts: list[tuple[int, ...]],
    replicas: int,
    one_machine: bool,
    below: bool,
    reason: str | None,
) -> None:
    found = obstacle(layouts, replicas, one_machine, below)
    assert found is None if reason is None else reason in (found or "")
