# SPDX-License-Identifier: Apache-2.0
"""What pd.py calls right, and how it asks pairs; no engine runs."""

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.suite import options


@pytest.fixture
def pd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The command as a module; it finds `suite` beside itself, by that name."""
    monkeypatch.syspath_prepend(str(Path(options.__file__).parents[1]))
    before = {*sys.modules}
    import pd as module

    yield module
    for name in {*sys.modules} - before:
        del sys.modules[name]


def cell(
    pd: Any, config: str, tokens: list[int], repeat: int = 0, **counts: float
) -> Any:
    """A cell of two turns of one conversation, both answered with `tokens`."""
    answers = [
        pd.Answer(f"{turn}-0", 10, turn, [turn + 0.5, turn + 1.0], tokens)
        for turn in range(2)
    ]
    known = {key: 1.0 for key in pd.COUNTS} | {key: 0.0 for key in pd.FAILURES}
    one = {key: counts.get(key, value) for key, value in known.items()}
    return pd.Cell(config, repeat, answers, [one, one])


def verdict(pd: Any, *cells: Any, exact: bool = True, repeats: int = 1) -> list[str]:
    names = [c.config for c in cells if c.config != pd.REFERENCE]
    args = Namespace(
        batch_invariant=exact,
        device="cuda",
        repeats=repeats,
        configs=list(dict.fromkeys(names)),
    )
    return pd.verdict(args, list(cells))


def test_equal_answers_from_where_they_should_come(pd: Any) -> None:
    right = cell(pd, "one", [1, 2])
    assert verdict(pd, right, cell(pd, "both", [1, 2])) == []
    assert verdict(pd, right, cell(pd, "without", [1, 2], host=0)) == []


def test_what_is_not_as_it_must_be(pd: Any) -> None:
    right = cell(pd, "one", [1, 2])

    def said(config: str, tokens: list[int], **counts: float) -> str:
        return "; ".join(verdict(pd, right, cell(pd, config, tokens, **counts)))

    assert said("both", [1, 3]) == "both: 2 answers differ"
    assert "the decode side found nothing on its host" in said("both", [1, 2], host=0)
    assert "the prefill side found nothing" in said("prefill", [1, 2], host=0)
    assert "decode side found" not in said("prefill", [1, 2], host=0)
    assert "nothing was passed on" in said("without", [1, 2], bytes=0)
    assert "2 failed copies of the prefill side" in said(
        "both", [1, 2], **{"failed copies": 2}
    )
    assert said("race", [1, 2]) == "race: the planted race was not noticed"
    assert said("race", [1, 3], **{"failed copies": 2}) == ""


def test_rounding_is_forgiven_where_nothing_rules_it_out(pd: Any) -> None:
    cells = cell(pd, "one", [1, 2]), cell(pd, "both", [1, 3])
    assert verdict(pd, *cells, exact=False) == []


def test_repeats_that_were_not_reached(pd: Any) -> None:
    cells = cell(pd, "one", [1]), cell(pd, "both", [1])
    assert verdict(pd, *cells, repeats=3) == ["both: 1 of 3 repeats were reached"]


def test_times_of_a_cell(pd: Any) -> None:
    found = cell(pd, "both", [1, 2])
    assert (found.requests_per_s, found.ttft_ms(True)) == (1.0, 500.0)
    assert "| both | 1 (1 to 1) | 500 (500 to 500)" in pd.table([found])


ENGINE = """
import asyncio, json, sys

async def answer(reader, writer):
    asked = json.loads(await reader.readline())
    if asked["max_tokens"] == 3:
        told = [{"error": "it is ill"}]
    else:
        told = {"tokens": [7] * asked["max_tokens"], "cached": len(asked["prompt"])}
        transfer = asked["transfer"] and dict(asked["transfer"], seen=sys.argv[2])
        told = [dict(told, transfer=transfer)]
    for line in told:
        writer.write(json.dumps(line).encode() + b"\\n")
    writer.close()

async def main():
    server = await asyncio.start_unix_server(answer, sys.argv[1], limit=1 << 20)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.fixture
def pair(pd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Real processes, with engines made up."""
    from suite import engines  # type: ignore[import-not-found]

    real = engines.subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        job = json.loads(Path(command[-1]).read_text())
        name = Path(command[-1]).stem
        return real([sys.executable, "-c", ENGINE, job["socket"], name], **more)

    monkeypatch.setattr(engines.subprocess, "Popen", start)
    some = [engines.Engine(n, {}, {}, tmp_path, tmp_path) for n in ("p", "d")]
    for engine in some:
        engine.wait(float("inf"))
    yield engines.Pair(*some)
    for engine in some:
        engine.end()


def test_a_pair_hands_over_what_the_connector_says(pair: Any) -> None:
    asked: list[Any] = []
    prefill, decode = pair.engines
    inner = decode.ask

    async def ask(answer: Any, *args: Any) -> Any:
        asked.append(args)
        return await inner(answer, *args)

    decode.ask = ask

    async def run() -> Any:
        pair.pause()
        async with pair.alone():
            return await pair.ask("k", [1, 2, 3], 2)

    answer = asyncio.run(run())
    assert (answer.tokens, len(answer.times), answer.cached_tokens) == ([7, 7], 2, 3)
    assert answer.ttft_s > 0
    ((prompt, max_tokens, transfer),) = asked
    assert (prompt, max_tokens) == ([1, 2, 3], 2)
    assert transfer["do_remote_decode"] and transfer["seen"] == "job-p"


def test_an_engine_that_fails_says_which(pair: Any) -> None:
    with pytest.raises(RuntimeError, match="d: it is ill"):
        asyncio.run(pair.ask("k", [1], 3))
