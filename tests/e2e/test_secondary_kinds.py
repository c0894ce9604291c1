# SPDX-License-Identifier: Apache-2.0
"""Files below the host of models whose KV cache groups are not all alike.

`KV_TIER_KINDS=all` runs it: groups of which some need less than a slot (Gemma-3),
blocks of two sizes (Gemma-4), and states beside full attention (Falcon-H1).
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ..settings import with_debug
from .compare import assert_same_answers
from .conftest import run_engine
from .kinds import KINDS
from .secondary import NEEDS_KEYS, objects
from .sharp_weights import CAN_REGISTER
from .test_kinds import lacking

pytestmark = [
    NEEDS_KEYS,
    pytest.mark.skipif(
        os.environ.get("KV_TIER_KINDS") != "all", reason="slow: KV_TIER_KINDS=all"
    ),
    pytest.mark.skipif(not CAN_REGISTER, reason="random weights have no KV to keep"),
]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "falcon_h1"])
def test_another_engine_finds_what_one_has_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := lacking(kind):
        pytest.skip(why)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    model = KINDS[kind].write(tmp_path / "model")
    # The load format makes its weights, which a file must stand for.
    (model / "model.safetensors").write_bytes(b"sharp")
    root = tmp_path / "kv"
    entry = {"type": "fs", "root_dir": str(root), "max_gib": 0.5}
    entry = with_debug(entry, store_from_use=1, fetch="always", deadline_ms=20_000)
    job = KINDS[kind].jobs()["write_through"]
    config = job.llm["kv_offloading_config"] | {"secondary_tiers": [entry]}
    job = replace(
        job,
        llm=job.llm | {"kv_offloading_config": config},
        workloads=["conversations"],
    )
    first, second = (
        run_engine(name, job, model, tmp_path)["workloads"]["conversations"]["answers"]
        for name in ("first", "second")
    )
    sizes = {path.stat().st_size for path in objects(root)}
    assert len(sizes) == (2 if kind == "gemma3" else 1)
    assert_same_answers(second, first)
    assert first[0]["cached_tokens"] == 0 < second[0]["cached_tokens"]
    assert sum(a["cached_tokens"] for a in second) > sum(
        a["cached_tokens"] for a in first
    )
