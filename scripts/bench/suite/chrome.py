# SPDX-License-Identifier: Apache-2.0
"""A timeline as Chrome's trace format has it, for chrome://tracing and Perfetto."""

from collections.abc import Iterable, Iterator
from typing import Any

from .recorder import Event
from .steps import Waiter, within

LEVELS = ("running", "waiting", "free", "kept")
"""Numbers of each step that are drawn as curves."""


def chrome_trace(
    events: Iterable[Event],
    waiters: Iterable[Waiter],
    window: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """What goes into the file: times in microseconds from the first event on."""
    shown = [event for event in events if within(event, window)]
    start = min((event.begin for event in shown), default=0.0)
    return {
        "traceEvents": [
            *_names(shown),
            *(_span(event, start) for event in shown if event.seconds),
            *_levels(shown, start),
            *_waits(waiters, start),
        ],
        "displayTimeUnit": "ms",
    }


def _names(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    tracks: dict[int, set[str]] = {}
    for event in events:
        tracks.setdefault(event.process, set()).add(event.track)
    for process, found in tracks.items():
        parts = ["engine core"] if "scheduler" in found else []
        parts += sorted(t for t in found if t.startswith("rank") and " " not in t[5:])
        name = {"name": " and ".join(parts)}
        yield {"ph": "M", "name": "process_name", "pid": process, "args": name}


def _span(event: Event, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "pid": event.process,
        "tid": event.args.get("thread") or event.track,
        "ts": _us(event.begin - start),
        "dur": _us(event.seconds),
        "args": event.args,
    }


def _levels(events: Iterable[Event], start: float) -> Iterator[dict[str, Any]]:
    for event in events:
        if event.name != "schedule":
            continue
        for level in LEVELS:
            yield {
                "ph": "C",
                "name": level,
                "pid": event.process,
                "ts": _us(event.end - start),
                "args": {level: event.args[level]},
            }


def _waits(waiters: Iterable[Waiter], start: float) -> Iterator[dict[str, Any]]:
    """Requests that wait, each on a row of its own where they overlap."""
    for number, waiter in enumerate(waiters):
        if waiter.seconds is None:
            continue
        common = {
            "cat": "waiting",
            "name": f"waits: {waiter.request}",
            "id": number,
            "pid": waiter.process,
            "tid": "waiting",
        }
        args = {"blocks": waiter.blocks, "left": waiter.left, "waits": waiter.waits}
        begin, end = waiter.begin - start, waiter.begin + waiter.seconds - start
        yield common | {"ph": "b", "ts": _us(begin), "args": args}
        yield common | {"ph": "e", "ts": _us(end)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
