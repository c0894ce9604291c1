# SPDX-License-Identifier: Apache-2.0
"""Files below the host of an engine with several ranks, and of several engines.

Each rank has an object of its own for a block, and a block counts if all ranks have
theirs. Ranks that hold the same may have one in common.
"""

import statistics
import time
from pathlib import Path

import pytest

from .jobs import BLOCK_TOKENS, WITH_RANKS
from .model import make_llama, make_tokenizer
from .pipeline_cpu import STAGES
from .release import CHOOSES_REPLICAS, REPLICAS_ENVIRONMENT
from .secondary import (
    HIT,
    NEEDS_KEYS,
    ask,
    directory,
    objects,
    prompts,
    serving,
    writes,
)
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(400, 6)
LONG = 15
"""Blocks of a prompt that takes its time to compute."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(tmp_path_factory.mktemp("ranks"))
    make_tokenizer(model)
    return model


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--tensor-parallel-size", "2"],
            id="tensor",
            marks=pytest.mark.pairs("FS", "TP"),
        ),
        pytest.param(
            STAGES, id="pipeline", marks=[WITH_RANKS, pytest.mark.pairs("FS", "PP")]
        ),
    ],
)
def test_a_block_counts_if_all_ranks_have_their_part(
    model: Path, tmp_path: Path, flags: list[str]
) -> None:
    root = tmp_path / "kv"
    entries = [directory(root)]
    with serving(model, entries, tmp_path / "log1", flags) as server:
        texts = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
    assert len(set(texts)) == len(PROMPTS)
    ranks = sorted({path.parent.parent.name for path in objects(root)})
    assert ranks == ["r0", "r1"]
    # The last prompt's parts of one rank are damaged, some so that only reading tells.
    with serving(model, entries, tmp_path / "log2", flags) as server:
        found = [ask(server, prompt) for prompt in PROMPTS[:3]]
        assert [answer for answer, _ in found] == texts[:3]
        assert [hits for _, hits in found] == [HIT] * 3
        for i, path in enumerate(objects(root)):
            if path.parent.parent.name == "r1" and i % 2:
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
            elif path.parent.parent.name == "r1":
                path.unlink()
        found = [ask(server, prompt) for prompt in PROMPTS[3:]]
        assert [answer for answer, _ in found] == texts[3:]
        assert sum(hits for _, hits in found) == 0


@pytest.mark.pairs("FS", "TP", "SH")
@WITH_RANKS
def test_ranks_that_hold_the_same_have_one_object(tmp_path: Path) -> None:
    """One head of keys and values, which both ranks have, as they all have MLA's."""
    model = make_llama(tmp_path / "model", kv_heads=1)
    make_tokenizer(model)
    root = tmp_path / "kv"
    entries = [directory(root)]
    flags = ["--tensor-parallel-size", "2"]
    with serving(
        model, entries, tmp_path / "log1", flags, share_replicas=True
    ) as server:
        texts = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
        assert "share one object for each block" in server.log()
    assert len(set(texts)) == len(PROMPTS)
    assert {path.parent.parent.name for path in objects(root)} == {"r0"}
    with serving(
        model, entries, tmp_path / "log2", flags, share_replicas=True
    ) as server:
        found = [ask(server, prompt) for prompt in PROMPTS[:3]]
        assert [answer for answer, _ in found] == texts[:3]
        assert [hits for _, hits in found] == [HIT] * 3
        for i, path in enumerate(objects(root)):
            if i % 2:
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
            else:
                path.unlink()
        found = [ask(server, prompt) for prompt in PROMPTS[3:]]
        assert [answer for answer, _ in found] == texts[3:]
        assert sum(hits for _, hits in found) == 0


@pytest.mark.pairs("FS", "DP")
@pytest.mark.skipif(not CHOOSES_REPLICAS, reason="a request cannot name its engine")
def test_what_one_data_parallel_engine_computed_another_one_finds(
    model: Path, tmp_path: Path
) -> None:
    flags = ["--data-parallel-size", "2"]
    times: dict[str, list[float]] = {"computed": [], "found": []}
    with serving(
        model,
        [directory(tmp_path / "kv")],
        tmp_path / "log",
        flags,
        REPLICAS_ENVIRONMENT,
    ) as server:

        def stored() -> float:
            found = server.metrics("vllm:kv_tier_")
            return found.get("vllm:kv_tier_secondary_stored_blocks_total", 0)

        def asked(prompt: list[int], replica: int, kind: str) -> str:
            begun = time.perf_counter()
            answer = server.complete(prompt, replica, max_tokens=1)
            times[kind].append(time.perf_counter() - begun)
            # Some releases say nothing of none.
            details = answer["usage"]["prompt_tokens_details"] or {}
            cached = details.get("cached_tokens", 0)
            assert cached == (LONG * BLOCK_TOKENS if kind == "found" else 0)
            return answer["choices"][0]["text"]

        for i in range(6):
            prompt = text(500 + i, LONG * BLOCK_TOKENS + 1)
            one, other = i % 2, 1 - i % 2
            before = stored()
            answer = asked(prompt, one, "computed")
            limit = time.monotonic() + 60
            while stored() < before + LONG:
                assert time.monotonic() < limit, "not all is written"
                server.complete(text(900 + i, 9 * BLOCK_TOKENS), one, max_tokens=8)
            assert asked(prompt, other, "found") == answer
    medians = {kind: statistics.median(some) for kind, some in times.items()}
    print("seconds", medians)
