# SPDX-License-Identifier: Apache-2.0
"""Clients that take one conversation of a trace after the other, with a fake engine."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.suite.client import Answer
from bench.suite.closed_loop import ClosedLoop, goes_on
from sizing.trace import Call

TWO = ClosedLoop(2, 3, shrink=8, turns=(2, 3), output=4, think=0.0)


class FakeClient:
    """Answers after `seconds`, and remembers what runs at the same time."""

    vocab = 500
    max_prompt_tokens = 1000

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, int, int]] = []
        self.prompts: dict[str, list[int]] = {}
        self.running: set[int] = set()
        self.most = 0

    async def ask(
        self,
        key: str,
        prompt: Sequence[int],
        max_tokens: int,
        answer: Answer | None = None,
        conversation: int = 0,
    ) -> Answer:
        assert conversation not in self.running, "A turn before the answer to the last"
        self.running.add(conversation)
        self.most = max(self.most, len(self.running))
        self.asked.append((key, len(prompt), conversation))
        self.prompts[key] = list(prompt)
        clock = asyncio.get_running_loop().time
        sent = clock()
        await asyncio.sleep(self.seconds)
        self.running.remove(conversation)
        times = [clock()] * max_tokens
        return Answer(key, len(prompt), sent, times, [1] * max_tokens)


def trace(path: Path) -> str:
    """Three conversations of two turns and more, one of a single turn, one too long."""
    lines = [
        # (ms, input, output, ids)
        (0, 1024, 80, [1, 10]),
        (1000, 1024, 8, [1, 20]),
        (2000, 1500, 16, [1, 10, 11]),
        (3000, 900, 16, [1, 99]),
        (4000, 1024, 16, [1, 30]),
        (5000, 1600, 16, [1, 20, 21, 22]),
        (5500, 1500, 16, [1, 30, 31]),
        (6000, 2048, 16, [1, 10, 11, 12]),
        (7000, 2500, 16, [1, 10, 11, 12, 13]),
        # Another beginning after all: not the same conversation's next turn.
        (8000, 2500, 16, [1, 20, 77, 78, 79]),
        (9000, 20000, 16, [1, *range(200, 239)]),
        (9500, 20100, 16, [1, *range(200, 239)]),
        # So many go on from the first id that it is none of a conversation.
        *((9900, 600, 16, [1, 300 + i]) for i in range(5)),
    ]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(keys, line))) for line in lines))
    return str(path)


def test_conversations_are_those_of_the_trace(tmp_path: Path) -> None:
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"))
    talks = work.talks(500, 1000, repeat=0)
    assert [[len(turn.prompt) for turn in talk] for talk in talks] == [
        [128, 187, 256],
        [128, 200],
        [128, 187],
    ]
    assert [[turn.output for turn in talk] for talk in talks] == [
        [4, 2, 2],
        [1, 2],
        [2, 2],
    ]
    for talk in talks:
        for before, turn in zip(talk, talk[1:]):
            # The last id of a prompt may stand for fewer tokens than it does later.
            whole = len(before.prompt) // 64 * 64
            assert turn.prompt[:whole] == before.prompt[:whole]
    assert talks[0][0].prompt[:64] == talks[1][0].prompt[:64]
    assert talks[0][0].prompt[64:] != talks[1][0].prompt[64:]


def test_what_is_asked_depends_on_name_and_repeat_alone(tmp_path: Path) -> None:
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"))
    assert work.talks(500, 1000, 0) == work.talks(500, 1000, 0)
    first = work.talks(500, 1000, 0)[0][0].prompt
    assert work.talks(500, 1000, 1)[0][0].prompt[:64] != first[:64]
    other = replace(work, name="other").talks(500, 1000, 0)
    assert other[0][0].prompt[:64] != first[:64]


def test_think_time_is_a_part_of_the_gap_and_has_a_limit(tmp_path: Path) -> None:
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"), think=0.1, max_think_s=0.3)
    thinks = [[t.think_s for t in talk] for talk in work.talks(500, 1000, 0)]
    assert thinks[0] == [0, pytest.approx(0.2), 0.3]


def test_too_few_conversations_are_refused(tmp_path: Path) -> None:
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"), conversations=4)
    with pytest.raises(ValueError, match="has 3 conversations of 2 turns"):
        work.talks(500, 1000, 0)


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_so_many_talk_at_a_time_and_each_waits_for_its_answer(
    tmp_path: Path, clients: int
) -> None:
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"), clients=clients)
    fake = FakeClient()
    outcome = asyncio.run(work.run(fake, 0))
    assert fake.most == clients
    keys = ["0.0", "0.1", "0.2", "1.0", "1.1", "2.0", "2.1"]
    assert [answer.key for answer in outcome.answers] == keys
    assert sorted(key for key, _, _ in fake.asked) == keys
    talks = work.talks(500, 1000, 0)
    assert fake.prompts == {
        f"{i}.{k}": turn.prompt
        for i, talk in enumerate(talks)
        for k, turn in enumerate(talk)
    }
    assert {"later_ttft_ms.mean", "makespan_s", "decode_ms.mean"} <= {*outcome.metrics}


def test_the_load_follows_the_engine(tmp_path: Path) -> None:
    """One that answers at once is done sooner: arrivals are not the trace's."""
    work = replace(TWO, path=trace(tmp_path / "t.jsonl"), clients=1)
    spans = [
        asyncio.run(work.run(FakeClient(seconds), 0)).answers
        for seconds in (0.001, 0.05)
    ]
    fast, slow = (run[-1].times[-1] - run[0].sent for run in spans)
    assert slow > 7 * 0.05 * 0.99 and fast < slow / 2


def test_a_prompt_goes_on_from_one_that_it_holds() -> None:
    def call(tokens: int, *ids: int) -> Call:
        return Call(0.0, tokens, 1, ids)

    assert goes_on(call(600, 1, 2), call(1200, 1, 9, 3))
    assert not goes_on(call(1100, 1, 2, 3), call(1300, 1, 9, 3))
    assert not goes_on(call(1200, 1, 2, 3), call(1100, 1, 2, 3))
