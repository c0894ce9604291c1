# SPDX-License-Identifier: Apache-2.0
"""A timeline's arithmetic: steps, their classes, copies and waits, and its files."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.suite.chrome import chrome_trace
from bench.suite.hooks import STEP, Hooks, counts
from bench.suite.recorder import Event, Recorder, read_events, wrap
from bench.suite.steps import Step, copies_of, owners_of, steps_of, waiters_of
from bench.suite.where import classes, row, split, tables

CORE, RANK = 7, 8
"""Processes of the scheduler and of a rank."""


def step_events(
    number: int,
    begin: float,
    end: float,
    joined: int = 0,
    prefill: int = 0,
    decode: int = 4,
    **plan: int,
) -> list[Event]:
    """What is recorded of a step: planned at `begin`, its output there at `end`."""
    key = [CORE, number]
    numbers = {"joined": joined, "prefill_tokens": prefill, "decode_tokens": decode}
    levels = {"running": 4, "waiting": 1, "free": 10 * number, "kept": 2}
    blocks = dict.fromkeys(("store", "clean", "load", "ahead"), 0) | plan
    what = {"step": key, "seq": number, **numbers, **levels}
    return [
        Event(CORE, "scheduler", "plan", begin, 0.001, {"seq": number, **blocks}),
        Event(CORE, "scheduler", "schedule", begin, 0.002, what),
        Event(CORE, "executor", "execute", begin + 0.002, 0.003, {"step": key}),
        Event(RANK, "rank 0", "forward", begin + 0.002, 0.004, {"step": key}),
        Event(RANK, "rank 0", "begin_step", begin + 0.002, 0.001, {"step": key}),
        Event(CORE, "scheduler", "update", end, 0.001, {"step": key}),
    ]


def report_event(at: float, *times: tuple[str, int, int, float]) -> Event:
    said = {"times": [list(each) for each in times], "failures": {}}
    return Event(CORE, "scheduler", "report", at, 0.0, said)


def test_a_steps_time_is_what_it_takes_on_top_of_the_one_before() -> None:
    """Two are under way at a time; and nothing is done between 1.05 and 2."""
    events = [
        *step_events(1, 1.0, 1.02),
        *step_events(2, 1.005, 1.05),
        *step_events(3, 2.0, 2.01),
    ]
    found = [round(step.seconds, 6) for step in steps_of(events)]
    assert found == [0.02, 0.03, 0.01]


def test_replicas_do_not_take_from_each_others_time() -> None:
    other = [
        e._replace(process=CORE + 100, args=e.args | {"step": [CORE + 100, 1]})
        for e in step_events(1, 1.0, 1.04)
    ]
    found = steps_of([*step_events(1, 1.01, 1.05), *other])
    assert [round(step.seconds, 6) for step in found] == [0.04, 0.04]


def test_a_step_knows_its_parts_and_its_plan() -> None:
    events = [
        *step_events(1, 1.0, 1.02, joined=1, prefill=64, store=3, load=5, ahead=2),
        report_event(
            1.1, ("stall", 1, 2, 0.004), ("stall", 1, 1, 0.001), ("load", 1, 5, 9.0)
        ),
        Event(RANK + 1, "rank 1", "begin_step", 1.002, 0.002, {"step": [CORE, 1]}),
    ]
    (step,) = steps_of(events)
    assert (step.store, step.clean, step.load, step.ahead) == (3, 0, 5, 2)
    assert step.stall_s == pytest.approx(0.005)
    assert (step.schedule_s, step.launch_s, step.copies_s) == (0.002, 0.003, 0.002)
    assert step.fences_s is None and step.forward_s == 0.004
    assert step.counts["free"] == 10


def test_times_of_the_device_come_before_those_of_the_host() -> None:
    key = {"step": [CORE, 1]}
    for order in (1, -1):
        device = [
            Event(RANK, "rank 0, GPU", "forward", 1.0, 0.003, key),
            Event(RANK, "rank 0, GPU", "fences", 1.0, 0.001, key),
            *step_events(1, 1.0, 1.02),
        ][::order]
        (step,) = steps_of(device)
        assert (step.forward_s, step.fences_s) == (0.003, 0.001)


def test_only_steps_that_run_something_within_the_window_count() -> None:
    events = [
        *step_events(1, 1.0, 1.1),
        *step_events(2, 1.2, 1.3, decode=0),
        *step_events(3, 1.4, 1.5),
        *step_events(4, 1.6, 1.7),
        # Its output never came.
        *step_events(5, 1.65, 1.69)[:-1],
    ]
    assert [s.key[1] for s in steps_of(events)] == [1, 3, 4]
    assert [s.key[1] for s in steps_of(events, (1.2, 1.6))] == [3]


def step(**counted: int) -> Step:
    plan = {k: counted.pop(k, 0) for k in ("store", "clean", "load", "ahead")}
    known = {"joined": 0, "prefill_tokens": 0, "decode_tokens": 4}
    numbers = known | {"running": 1, "waiting": 0, "free": 1, "kept": 0} | counted
    return Step((CORE, 1), 0.0, 0.01, 0.01, 0.001, numbers, **plan)


@pytest.mark.parametrize(
    "made, name",
    [
        (step(), "decode only; no copies"),
        (step(store=1), "decode only; victims stored"),
        (step(clean=1), "decode only; copies beside"),
        (step(ahead=1, store=2), "decode only; victims stored, copies beside"),
        (step(prefill_tokens=9), "prefill goes on; no copies"),
        (step(joined=1, prefill_tokens=9, load=3), "joins; loads"),
        (step(joined=1, prefill_tokens=1), "joins; no copies"),
    ],
)
def test_classes_of_steps(made: Step, name: str) -> None:
    assert [found for found, _ in classes([made])] == [name]


def test_those_that_took_most_come_first() -> None:
    found = classes([step(), step(), step(clean=1)])
    assert [(name, len(some)) for name, some in found] == [
        ("decode only; no copies", 2),
        ("decode only; copies beside", 1),
    ]


def test_each_question_has_both_answers() -> None:
    steps = [step(), step(store=2), step(joined=1, prefill_tokens=3, store=1)]
    found = {name: len(some) for name, some in split(steps)}
    assert found["a request joins"] == 1 and found["not: a request joins"] == 2
    assert found["victims are stored"] == 2 and found["not: victims are stored"] == 1
    assert "loads in the step" not in found


def test_a_row_has_medians_and_its_share() -> None:
    some = [step(), step(), step()]
    for each, seconds in zip(some, (0.010, 0.012, 0.030)):
        each.seconds = seconds
    some[0].stall_s = 0.003
    cells = row("x", some, 0.104)
    assert cells[:4] == ["x", "3", "50%", "12 (30; 30)"]
    assert cells[8:10] == ["1", "not recorded"]
    some[1].fences_s = 0.002
    assert row("x", some, 0.104)[9] == "2"


def copy(kind: str, seq: int, begin: float, seconds: float, gpu: bool = False) -> Event:
    track = "rank 0 copies" + (", GPU" if gpu else "")
    what = {"seq": seq, "blocks": 4, "thread": "kv-tier-ahead"}
    return Event(RANK, track, kind, begin, seconds, what)


def waiting(name: str, at: float, request: str, plan: int = 0) -> Event:
    what: dict[str, Any] = {"request": request}
    if name == "wait":
        what |= {"blocks": 40, "left": 3, "plan": plan}
    return Event(CORE, "waiting", name, at, 0.0, what)


def test_copies_are_timed_on_the_device_where_it_told() -> None:
    events = [*step_events(1, 1.0, 1.1), copy("store", 1, 1.0, 0.001)]
    owners = owners_of(events)
    (host,) = copies_of(events, owners)
    assert (host.plan, host.seconds) == ((CORE, 1), 0.001)
    events.append(copy("store", 1, 1.0, 0.005, gpu=True))
    (device,) = copies_of(events, owners)
    assert device.seconds == 0.005
    assert not copies_of(events, owners, (2.0, 3.0))


def test_waits_last_until_admission_and_know_their_loads() -> None:
    events = [
        *step_events(1, 1.0, 1.1),
        waiting("wait", 1.0, "a", plan=1),
        waiting("wait", 1.02, "a", plan=2),
        waiting("wait", 1.03, "b"),
        # One that did not wait.
        waiting("admitted", 1.04, "c"),
        waiting("admitted", 1.06, "a"),
        copy("load_ahead", 1, 1.001, 0.010),
        copy("load_ahead", 2, 1.021, 0.020),
        copy("load_ahead", 3, 1.050, 0.900),
    ]
    copies = copies_of(events, owners_of(events))
    a, b = waiters_of(events, copies)
    assert (a.request, a.waits, a.blocks, a.left) == ("a", 2, 40, 3)
    assert a.seconds == pytest.approx(0.06)
    assert (a.loads_begin, a.loads_end) == (1.001, pytest.approx(1.041))
    assert a.late_s == pytest.approx(0.019)
    assert b.seconds is None and b.late_s is None
    text = "\n".join(tables(steps_of(events), copies, [a, b]))
    assert "2 began to wait, 1 were admitted, after 60 ms; 19 ms after" in text
    assert "| a | 60 | 2 | 40 | 3 | 1 | 41 |" in text
    assert "| rank 0, load_ahead | 3 |" in text


def test_sums_and_means_are_of_all_steps() -> None:
    """A level counts for as long as its step takes."""
    events = [
        *step_events(1, 1.0, 1.1, joined=1, prefill=250),
        *step_events(2, 1.1, 1.4),
    ]
    text = "\n".join(tables(steps_of(events), [], []))
    assert (
        "250 tokens of prompts in 1 steps of 0.1 s. Forward passes take 0.008" in text
    )
    assert "| free blocks | 17.5 | 15 | 10 | 20 |" in text


def test_a_run_without_decoding_says_so() -> None:
    assert [*tables([step(decode_tokens=0)], [], [])] == ["No step decoded."]


def test_chrome_gets_spans_curves_and_waits() -> None:
    events = [
        *step_events(1, 1.0, 1.1),
        waiting("wait", 1.0, "a"),
        waiting("admitted", 1.05, "a"),
        copy("load_ahead", 1, 1.001, 0.010),
    ]
    waiters = waiters_of(events, [])
    trace = json.loads(json.dumps(chrome_trace(events, waiters)))["traceEvents"]
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in trace:
        by_phase.setdefault(event["ph"], []).append(event)
    of_kind: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    for event in by_phase["M"]:
        place = event["pid"], event.get("tid")
        of_kind[event["name"]][place] = event["args"]["name"]
    processes, rows = of_kind.values()
    assert processes == {(CORE, None): "engine core", (RANK, None): "rank 0"}
    spans = {e["name"]: e for e in by_phase["X"]}
    row_of = {name: rows[e["pid"], e["tid"]] for name, e in spans.items()}
    assert (spans["schedule"]["ts"], spans["schedule"]["dur"]) == (0, 2000)
    assert row_of["schedule"] == "scheduler" and row_of["forward"] == "rank 0"
    assert row_of["load_ahead"] == "rank 0 copies, kv-tier-ahead"
    assert spans["load_ahead"]["ts"] == 1000
    assert {e["name"] for e in by_phase["C"]} == {"running", "waiting", "free", "kept"}
    (begin,), (end,) = by_phase["b"], by_phase["e"]
    assert (begin["id"], end["ts"] - begin["ts"]) == (end["id"], 50000)
    outside = chrome_trace(events, [], (5.0, 6.0))
    assert outside["traceEvents"] == []


def test_each_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new", every_s=60)
    recorder.add("here", "parent", 1.0, 1.5, step=[1, 2])

    def child() -> None:
        recorder.add("there", "child", 2.0, 2.25)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    recorder.write()
    found = {e.name: e for e in read_events(tmp_path / "new")}
    assert found["parent"] == Event(
        os.getpid(), "here", "parent", 1.0, 0.5, {"step": [1, 2]}
    )
    # The child wrote at its end, and not what the parent had.
    assert found["child"].process == process.pid and found["child"].end == 2.25
    assert len(found) == 2
    # At the end of the process nothing is left, and maybe no folder to write to.
    (tmp_path / "new").rename(tmp_path / "old")
    recorder.write()
    assert not (tmp_path / "new").exists()


def test_events_are_written_while_it_runs_and_a_torn_line_is_left(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, every_s=0.01)
    for i in range(200):
        recorder.add("here", str(i), 1.0, 1.0)
    until = time.monotonic() + 20
    while len([*read_events(tmp_path)]) < 200 and time.monotonic() < until:
        time.sleep(0.01)
    with (tmp_path / f"{os.getpid()}.jsonl").open("a") as file:
        file.write('["here", "torn", 1.')
    assert [e.name for e in read_events(tmp_path)] == [str(i) for i in range(200)]


def output(new: dict[str, int], resumed: dict[str, int], others: dict[str, int]) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=new | resumed | others,
        scheduled_new_reqs=[SimpleNamespace(req_id=key) for key in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={*resumed}),
    )


def test_requests_of_a_step_are_counted_by_what_they_do() -> None:
    # A hit of all but one token joins with one.
    made = output({"a": 1, "b": 50}, {"c": 7}, {"d": 1, "e": 1, "f": 30})
    assert counts(made) == {
        "joined": 3,
        "prefill_requests": 4,
        "prefill_tokens": 88,
        "decode_tokens": 2,
    }


def test_wrappers_record_a_step_and_change_nothing(tmp_path: Path) -> None:
    made = output({"a": 5}, {}, {"b": 1})
    made.kv_tier_plan = SimpleNamespace(seq=12)

    class Scheduler:
        running = [1, 2]
        waiting = [3]
        kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: 99)
        )

        def schedule(self, throttle: bool = False) -> Any:
            assert throttle
            return made

        def update_from_output(self, output: Any, model_output: Any) -> Any:
            return (output, model_output)

    recorder = Recorder(tmp_path, every_s=60)
    hooks = Hooks(recorder, device_times=False)
    wrap(Scheduler, "schedule", hooks._schedule)
    wrap(Scheduler, "update_from_output", hooks._update)
    scheduler = Scheduler()
    assert scheduler.schedule(True) is made
    assert scheduler.update_from_output(made, 5) == (made, 5)
    recorder.write()
    schedule, update = read_events(tmp_path)
    assert schedule.args["step"] == update.args["step"] == [os.getpid(), 1]
    assert getattr(made, STEP) == [os.getpid(), 1]
    said = {k: schedule.args[k] for k in ("seq", "running", "waiting", "free", "kept")}
    assert said == {"seq": 12, "running": 2, "waiting": 1, "free": 99, "kept": 0}
    assert schedule.args["joined"] == 1 and schedule.args["decode_tokens"] == 1
