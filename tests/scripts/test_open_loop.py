# SPDX-License-Identifier: Apache-2.0
"""Conversations that arrive at a rising rate, with a fake engine."""

import asyncio
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.suite import goodput
from bench.suite.client import Answer
from bench.suite.open_loop import OpenLoop, crossing, token_s
from bench.suite.table import Results

from .test_bench_suite import cell
from .test_closed_loop import FakeClient, trace

ROOT = Path(__file__).parents[2]
FAST = OpenLoop(
    rates=(20, 60),
    phase_s=0.5,
    lead_s=1.0,
    shrink=8,
    max_prompt=1000,
    think_s=0.2,
    systems=2,
    system_tokens=16,
)


@pytest.fixture
def work(tmp_path: Path) -> OpenLoop:
    return replace(FAST, path=trace(tmp_path / "trace.jsonl"))


def test_arrivals_follow_the_rates_and_repeat_with_their_seed(work: OpenLoop) -> None:
    long = replace(work, rates=(5, 20), phase_s=100.0, lead_s=10.0)
    talks = long.talks(500, 1016, repeat=1)
    begun = [talk[0].at_s for talk in talks]
    first = sum(0 <= at_s < 100 for at_s in begun)
    second = sum(100 <= at_s < 200 for at_s in begun)
    assert 400 < first < 600 and 1800 < second < 2200
    assert begun == sorted(begun) and max(begun) < 200
    assert talks == long.talks(500, 1016, repeat=1)
    assert talks != long.talks(500, 1016, repeat=2)


def test_turns_go_on_from_the_last_and_share_system_prompts(work: OpenLoop) -> None:
    talks = work.talks(500, 1016, repeat=0)
    systems = {tuple(turn.prompt[:16]) for talk in talks for turn in talk}
    assert len(systems) == 2
    texts = {tuple(talk[0].prompt[16:80]) for talk in talks}
    assert len(texts) == len(talks), "Two conversations with the same text"
    some_later = 0
    for talk in talks:
        assert talk[-1].at_s >= 0 and all(turn.at_s < 1.0 for turn in talk)
        for before, turn in zip(talk, talk[1:]):
            assert turn.prompt[: len(before.prompt)] == before.prompt
            assert turn.at_s > before.at_s
            some_later += 1
    assert some_later > 5


def test_histories_come_first_and_no_turn_before_its_answer(work: OpenLoop) -> None:
    client = FakeClient(0.03)
    talks = work.talks(client.vocab, client.max_prompt_tokens, 0)
    outcome = asyncio.run(work.run(client, 0))
    histories = [asked for asked in client.asked if asked[0] == "history"]
    assert histories == client.asked[: len(histories)] and histories
    due = sum(turn.at_s >= 0 for talk in talks for turn in talk)
    assert len(outcome.answers) == due == len(client.asked) - len(histories)
    assert outcome.metrics["good_turns"] == 1.0


def test_an_engine_that_falls_behind_has_fewer_good_turns(work: OpenLoop) -> None:
    limit = replace(work, good_ttft_s=0.02)
    slow = asyncio.run(limit.run(FakeClient(0.05), 0))
    fast = asyncio.run(limit.run(FakeClient(0.001), 0))
    assert slow.metrics["good_turns"] == 0.0
    assert fast.metrics["good_turns"] > 0.9
    assert {"good_turns.20", "ttft_ms.60.p90", "token_ms.60.mean"} <= {*fast.metrics}


def test_good_needs_both_the_first_and_the_further_tokens() -> None:
    in_time = Answer("a", 1, sent=0.0, times=[0.5, 0.52, 0.55])
    late = Answer("a", 1, sent=0.0, times=[0.51, 0.52])
    slow = Answer("a", 1, sent=0.0, times=[0.1, 0.2])
    one = Answer("a", 1, sent=0.0, times=[0.1])
    assert [FAST.is_good(a) for a in (in_time, late, slow, one)] == [
        *(True, False, False, True),
    ]
    assert token_s(in_time) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 0.99, 0.97], 4.0),
        ([1.0, 0.9, 0.0], 1.5),
        ([0.5, 0.4, 0.3], 0.5 / 0.95),
        # What comes after the first fall does not count.
        ([1.0, 0.9, 1.0], 1.5),
    ],
)
def test_the_rate_that_an_engine_bears(values: list[float], expected: float) -> None:
    assert crossing([1, 2, 4], values, 0.95) == pytest.approx(expected)


def test_a_trace_without_a_conversation_that_fits_is_refused(work: OpenLoop) -> None:
    with pytest.raises(ValueError, match=r"no conversation of 2 turns .*goodput\.max"):
        replace(work, max_prompt=8).talks(500, 1000, 0)


def test_the_table_has_the_better_mode_of_each_engine(tmp_path: Path) -> None:
    for config, good in (
        ("core-write_back", 0.9),
        ("offloading", 0.5),
        ("offloading-sync", 0.7),
    ):
        metrics = {"good_turns": good, "good_rate_per_s": 10 * good}
        metrics |= {f"{name}.4": good for name in ("good_turns", "ttft_ms")}
        metrics |= {"ttft_ms.4.mean": 100.0, "ttft_ms.4.p90": 2e3 * good}
        metrics["token_ms.4.mean"] = 9.0
        cell(tmp_path, config, metrics, workload="goodput")
    found = goodput.table(Results([tmp_path])).splitlines()
    assert found[0] == "|  | KVTier | OffloadingConnector |"
    assert found[2] == "| conversations/s with 95% good turns | **9** | 7 |"
    assert found[5] == "| TTFT at 4/s, 90th percentile, ms | 1,800 | **1,400** |"
    goodput.draw(Results([tmp_path]), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_pages_have_the_tables_of_the_kept_runs() -> None:
    """`make goodput-page` would change nothing."""
    pages = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
    before = [page.read_text() for page in pages]
    command = [sys.executable, "scripts/bench/goodput_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [page.read_text() for page in pages] == before
    assert re.search(r"KVTier .*\| SimpleCPUOffload", before[0])


def test_a_page_without_its_comments_is_refused() -> None:
    page = "a\n<!-- x: made by `make goodput-page` -->\nold\n<!-- x end -->\nb"
    assert "\n\nnew\n\n<!-- x end" in goodput.between(page, "x", "new")
    with pytest.raises(ValueError, match=r"<!-- y: made"):
        goodput.between(page, "y", "new")
