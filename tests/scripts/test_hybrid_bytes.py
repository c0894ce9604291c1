# SPDX-License-Identifier: Apache-2.0
"""What hybrid models take of the host: with upstream's planning and its scheduler."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.core.kv_cache_planning")
sys.path.append(str(Path(__file__).parents[2] / "scripts/bench"))

import hybrid_bytes

from sizing.shapes import SHAPES, plan
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.releases import spec_of_named
from vllm.v1.kv_tier.scheduler.kv_groups import group_blocks, tokens_per_block
from vllm.v1.kv_tier.scheduler.superseded import SupersededEnds
from vllm.v1.kv_tier.worker.group_bytes import group_bytes

TOKENS = 8192
WINDOWS = next(shape for shape in SHAPES if shape.name == "Gemma-3-12B")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_costs_are_those_of_a_real_hit(shape: Any) -> None:
    """Blocks that a hit loads, as upstream looks it up, to those expected at start."""
    num_tokens = 32_768
    planned = plan(shape, num_tokens)
    groups = group_blocks(planned.vllm_config, planned.kv_cache_config)
    many = 3 * sum(-(-num_tokens // group.block_size) for group in groups)
    engine = hybrid_bytes.Engine(planned, many, "lru")
    prompt = [i % 1000 for i in range(num_tokens - 8)]
    engine.serve(prompt)
    num_loads = engine.serve(prompt)
    loaded = engine.served.hit_tokens / num_loads
    assert loaded == pytest.approx(tokens_per_block(groups), rel=0.1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_tiers_are_asked_for_the_blocks_that_upstream_keeps(shape: Any) -> None:
    planned = plan(shape, TOKENS)
    asked, blocks = hybrid_bytes.asked(planned, TOKENS)
    engine = hybrid_bytes.Engine(planned, 16, "lru")
    kept = []
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    for manager, num_blocks in zip(managers, blocks):
        mask = manager.reachable_block_mask(
            0,
            num_blocks,
            manager.cache_hit_alignment_tokens,
            manager.kv_cache_spec,
            manager.use_eagle,
        )
        kept.append(num_blocks if mask is None else sum(mask))
    assert asked == kept
    if shape.name.startswith("DeepSeek-V4"):
        assert sum(asked) < 0.25 * sum(blocks)


@pytest.mark.parametrize("name", ["Gemma-3-27B", "DeepSeek-V4-Flash"])
def test_objects_have_what_groups_need_and_another_engine_hits_them(name: str) -> None:
    planned = plan(next(shape for shape in SHAPES if shape.name == name), TOKENS + 64)
    written, read, hit = hybrid_bytes.below(planned, TOKENS)
    assert hit > 0.96
    assert read.asked_keys <= sum(hybrid_bytes.asked(planned, TOKENS)[0])
    for moved, num_bytes in (
        (written, written.stored_bytes),
        (read, read.loaded_bytes),
    ):
        assert 0 < num_bytes < 0.97 * moved.blocks * planned.slot_bytes
        assert num_bytes >= moved.blocks * min(planned.group_bytes())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ranks_find_what_groups_need_in_memory(shape: Any) -> None:
    """With tensors as upstream lays them out. Groups with less begin at byte 0."""
    planned = plan(shape, 1024)
    config = planned.of_rank
    num_blocks = config.num_blocks
    # Touched by nobody.
    memory = torch.empty(config.kv_cache_tensors[0].size, dtype=torch.uint8)
    layers: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for group in config.kv_cache_groups:
        specs |= {n: spec_of_named(group.kv_cache_spec, n) for n in group.layer_names}
    for tensor in config.kv_cache_tensors:
        for i, name in enumerate(tensor.layers):
            stride = tensor.block_stride, 1
            first = tensor.offset + i * tensor.layer_stride
            shown = num_blocks, specs[name].page_size_bytes
            view = memory.as_strided(shown, stride, first)
            layers[name] = SimpleNamespace(kv_cache=view)
    in_order = [layers[name].kv_cache for name in sorted(layers, key=_number)]
    regions = build_regions(in_order, num_blocks)
    found = group_bytes(config.kv_cache_groups, layers, regions, num_blocks)
    needs = planned.group_bytes()
    if found:
        assert all(a >= b for a, b in zip(found, needs))
        assert sum(found) <= 1.02 * sum(needs)
    else:
        assert min(needs) == planned.slot_bytes


def _number(name: str) -> int:
    return int(name.split(".")[2])


def test_conversations_fit_in_what_their_next_turns_use() -> None:
    found = hybrid_bytes.measure(WINDOWS, 3, [1.3], [0.0], "proven", TOKENS)
    # The host keeps more, if there is room.
    assert found["kept"] > 3
    assert found["hits"][0.0][1.3] == 1


def test_a_window_that_the_next_turn_needs_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted bug: a turn's own window counts as superseded, too."""
    own = SupersededEnds.record_cached

    def record(self: Any, request: Any, blocks: Any, *args: Any) -> None:
        before = len(self._due)
        own(self, request, blocks, *args)
        if len(self._due) > before:
            self._supersede([b.block_hash for b in blocks if b.block_hash], False)

    monkeypatch.setattr(SupersededEnds, "record_cached", record)
    found = hybrid_bytes.measure(WINDOWS, 3, [1.3], [0.0], "proven", TOKENS)
    assert found["hits"][0.0][1.3] < 0.95
