# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic: what it compares, merges and calls a miss."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.suite.bars import bars
from bench.suite.client import Answer
from bench.suite.equality import compare
from bench.suite.records import Output, append, read_outputs, write_outputs
from bench.suite.scales import SCALES
from bench.suite.table import Results
from bench.suite.workloads import Trace, gaps_ms, spread, tokens


def cell(folder: Path, config: str, metrics: dict[str, float], **more: Any) -> None:
    family = {"core": "core", "off": "connector"}.get(config.split("-")[0], "plain")
    outputs = f"outputs/{config}.json.gz"
    record: dict[str, Any] = {
        "config": config,
        "family": family,
        "scale": "h200",
        "settings": config,
        "workload": "latency",
        "repeat": 0,
        "cell": "a",
        "status": "ok",
        "parameters": {},
        "logprobs": False,
        "block_size": 16,
        "machine": {},
        "metrics": metrics,
        "outputs": outputs,
    }
    record |= more
    append(folder, record)
    if record["status"] == "ok":
        write_outputs(folder / outputs, [Answer("x", 4, tokens=[1, 2, 3])])


def test_equal_near_tie_wrong_and_unknown() -> None:
    right = [Output(k, [1, 2, 3], [1.0, 0.01, 1.0]) for k in "abcd"]
    run = [
        Output("d", [1, 2, 3], []),
        Output("a", [1, 9, 3], [1.0, 0.04, 1.0]),
        Output("b", [1, 9, 3], [1.0, 0.06, 1.0]),
        Output("c", [1, 2, 9], []),
    ]
    result = compare(right, run)
    assert (result.near_ties, result.wrong, result.unknown) == (1, 1, 1)
    assert [(d.key, d.position) for d in result.differences] == [
        ("a", 1),
        ("b", 1),
        ("c", 2),
    ]
    assert result.tokens == 3 + 2 + 2 + 3


def test_other_requests_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="different requests"):
        compare([Output("a", [1], [])], [Output("b", [1], [])])


def test_an_answer_cut_short_is_compared_as_far_as_it_goes() -> None:
    result = compare([Output("a", [1, 2, 3], [])], [Output("a", [1, 2], [])])
    assert (result.differences, result.tokens) == ([], 2)


def test_outputs_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "outputs" / "x.json.gz"
    write_outputs(path, [Answer("a", 7, tokens=[4, 5], gaps=[0.25, 1.5])])
    assert read_outputs(path) == [Output("a", [4, 5], [0.25, 1.5])]


def test_bars_take_the_best_connector_and_medians_of_all_folders(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    name = "ttft_ms.host.1024"
    for folder, ours in ((one, 10.0), (two, 12.0), (two, 30.0)):
        cell(folder, "core-write_back", {name: ours})
    cell(one, "off-a", {name: 24.0})
    cell(one, "off-b", {name: 16.0})
    cell(one, "none", {name: 50.0, "ttft_ms.device.1024": 8.0})
    found = {bar.name: bar for bar in bars(Results([one, two]), 50.0, "none")}
    bar = found["latency: " + name]
    assert (bar.value, bar.verdict) == (12.0 / 16.0, "MISS")
    # 1,024 tokens of 128 KiB at 50 GB/s, and 8 ms.
    wire = found[f"latency: {name} / (wire + step)"]
    assert wire.value == pytest.approx(12.0 / (2.684 + 8), rel=1e-3)
    assert wire.verdict == "pass"
    assert found["agent: output_tokens_per_s"].verdict == "not measured"
    assert found["outputs: differ, and not by a near tie"].value == 0


def test_no_reuse_bar_is_the_ratio_of_throughputs(tmp_path: Path) -> None:
    for config, seconds in (("core", 10.0), ("none", 9.9)):
        cell(tmp_path, config, {"makespan_s": seconds}, workload="no_reuse")
    found = {bar.name: bar for bar in bars(Results([tmp_path]), None, "none")}
    bar = found["no_reuse: throughput / none"]
    assert (bar.value, bar.verdict) == (pytest.approx(0.99), "MISS")


def test_a_name_with_two_settings_is_refused(tmp_path: Path) -> None:
    cell(tmp_path, "core", {})
    cell(tmp_path, "core", {}, settings="other")
    with pytest.raises(ValueError, match="core was run with different settings"):
        Results([tmp_path])


def test_what_was_not_run_is_said_unless_a_later_call_ran_it(tmp_path: Path) -> None:
    for repeat in (0, 1):
        cell(tmp_path, "core", {}, status="not reached", reason="late", repeat=repeat)
    cell(tmp_path, "core", {}, repeat=1)
    (line,) = Results([tmp_path]).not_done()
    assert line == "core: not reached: late: latency 0"


def test_gaps_are_those_that_end_in_a_span() -> None:
    answer = Answer("a", 1, times=[0.0, 1.0, 3.0, 3.5])
    assert gaps_ms([answer], [(2.0, 3.2), (3.0, 3.1)]) == [2000.0]


def test_prompts_repeat_with_their_seed_only() -> None:
    assert tokens(1000, 50, "a", 1) == tokens(1000, 50, "a", 1)
    assert tokens(1000, 50, "a", 1) != tokens(1000, 50, "a", 2)


def test_lengths_are_spread() -> None:
    lengths = spread(4, 10, 7)
    assert sorted(lengths) == [4, 5, 6, 7, 8, 9, 10]
    assert lengths != sorted(lengths)


def test_trace_keeps_equal_prefixes_equal(tmp_path: Path) -> None:
    requests = [
        (0, 1000, 800, [1, 2]),
        (500, 1500, 8, [1, 2, 3]),
        (1000, 600, 1, [1, 9]),
    ]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [dict(zip(keys, request)) for request in requests]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    trace = Trace(1, 8, seconds=4, max_output=64, path=str(path))
    a, b, c = trace.requests(vocab=500, max_prompt=180, repeat=0)
    assert [r.at_s for r in (a, b, c)] == [0, 2, 4]
    assert [len(r.prompt) for r in (a, b, c)] == [125, 180, 75]
    assert [r.output for r in (a, b, c)] == [64, 1, 1]
    assert b.prompt[:125] == a.prompt
    assert c.prompt[:64] == a.prompt[:64]
    assert c.prompt[64:75] != a.prompt[64:75]
    again = trace.requests(vocab=500, max_prompt=180, repeat=1)
    assert again[0].prompt[:64] != a.prompt[:64]


@pytest.mark.parametrize("name", SCALES)
def test_workloads_stand_as_the_scale_says(name: str) -> None:
    """What must fit the device cache does, and what must not does not."""
    from bench.suite.configs import configs
    from bench.suite.model import SHAPES
    from bench.suite.workloads import Sessions

    scale = SCALES[name]
    itemsize = {"bfloat16": 2, "float32": 4}[scale.dtype]
    per_token = SHAPES[scale.shape].kv_bytes_per_token(itemsize)

    def times(workload: str) -> float:
        w = scale.workloads[workload]
        assert isinstance(w, Sessions)
        tokens = (sum(w.first) / 2 + (w.turns - 1) * w.more + w.output) * w.sessions
        return tokens * per_token / scale.device_bytes

    assert 2 < times("agent") < 3.5
    assert 2 < times("multiturn") < 4
    assert times("fits") < 0.8
    assert times("rotate") > 3
    large = configs(scale.host_gib, scale.device_bytes)["large"].device_scale
    all_sessions = [n for n, w in scale.workloads.items() if isinstance(w, Sessions)]
    assert len(all_sessions) == 6
    assert all(times(name) < large for name in all_sessions)
    rotate, overfull = (scale.workloads[name] for name in ("rotate", "overfull"))
    assert isinstance(rotate, Sessions) and isinstance(overfull, Sessions)
    at_once = times("rotate") / rotate.sessions
    assert rotate.at_once * at_once < 0.95
    assert 1.2 < overfull.at_once * at_once < 1.6
