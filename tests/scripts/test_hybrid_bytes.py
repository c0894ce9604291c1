# SPDX-License-Identifier: Apache-2.0
"""What hybrid models take of the host: with upstream's planning and its scheduler."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.kv_cache_planning")
sys.path.append(str(Path(__file__).parents[2] / "scripts/bench"))

import hybrid_bytes

from sizing.shapes import SHAPES, plan
from vllm.v1.kv_tier.scheduler.kv_groups import group_blocks, tokens_per_block
from vllm.v1.kv_tier.scheduler.superseded import SupersededEnds

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
    assert found["hits"][0.0][1.3] < 0.9
