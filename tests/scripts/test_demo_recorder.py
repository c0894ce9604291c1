# SPDX-License-Identifier: Apache-2.0
"""The demo's recorder, around a tier that really copies."""

import json
from pathlib import Path

import pytest

from demo.recorder import _record, _Spans
from page.demo import busiest
from vllm.v1.kv_tier.worker.copies import Copier
from vllm.v1.kv_tier.worker.host_tier import HostTier

from ..unit.rank import Rank, output, same

WRAPPED = {
    HostTier: ("begin_step", "end_step"),
    Copier: ("store", "load", "load_ahead", "clean"),
}


@pytest.fixture
def spans_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # So that they are put back afterwards.
    for owner, names in WRAPPED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    path = tmp_path / "spans.jsonl"
    _record(_Spans(str(path)))
    return path


def test_copies_and_forward_pass_of_a_step_are_kept(spans_file: Path) -> None:
    rank = Rank()
    one = rank.block(1)
    rank.run(1, store_blocks=[1, 2], store_slots=[3, 0])
    rank.tier.end_step(output())
    rank.run(2)
    rank.tier.end_step(output())
    rank.run(3, load_slots=[3], load_blocks=[5], ahead_slots=[0], ahead_blocks=[4])
    rank.tier.end_step(output())
    assert same(rank.block(5), one)
    spans = [json.loads(line) for line in spans_file.read_text().splitlines()]
    slot_bytes = rank.tier.buffer.slots.shape[1]
    assert [(s["seq"], s["what"], s["blocks"]) for s in spans] == [
        (1, "store", 2),
        (1, "forward", 0),
        (3, "load", 1),
        (3, "ahead", 1),
        (3, "forward", 0),
    ]
    assert all(s["bytes"] == s["blocks"] * slot_bytes for s in spans)
    assert all(s["start"] <= s["end"] for s in spans)
    assert spans[0]["end"] <= spans[1]["start"]
    assert {s["seq"] for s in busiest(spans)} == {1}
