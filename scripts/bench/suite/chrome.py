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
    rows = _Rows()
    drawn = [rows.span(event, start) for event in shown if event.seconds]
    return {
        "traceEvents": [
            *_processes(shown),
            *rows.names(),
            *drawn,
            *_levels(shown, start),
            *_waits(waiters, start),
        ],
        "displayTimeUnit": "ms",
    }


class _Rows:
    """The rows of each process, which the format has by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def span(self, event: Event, start: float) -> dict[str, Any]:
        # Copies beside each other have threads of their own. The device has its rows.
        on_host = not event.track.endswith("GPU")
        thread = event.args.get("thread") if on_host else None
        name = event.track if thread is None else f"{event.track}, {thread}"
        number = self._numbers.setdefault((event.process, name), len(self._numbers) + 1)
        return {
            "ph": "X",
            "name": event.name,
            "pid": event.process,
            "tid": number,
            "ts": _us(event.begin - start),
            "dur": _us(event.seconds),
            "args": event.args,
        }

    def names(self) -> Iterator[dict[str, Any]]:
        for (process, name), number in self._numbers.items():
            yield _name("thread_name", name, process) | {"tid": number}


def _name(kind: str, name: str, process: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "args": {"name": name}}


def _processes(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    tracks: dict[int, set[str]] = {}
    for event in events:
        tracks.setdefault(event.process, set()).add(event.track)
    for process, found in tracks.items():
        parts = ["engine core"] if "scheduler" in found else []
        parts += sorted(t for t in found if t.startswith("rank") and " " not in t[5:])
        yield _name("process_name", " and ".join(parts), process)


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
            "tid": 0,
        }
        args = {"blocks": waiter.blocks, "left": waiter.left, "waits": waiter.waits}
        begin, end = waiter.begin - start, waiter.begin + waiter.seconds - start
        yield common | {"ph": "b", "ts": _us(begin), "args": args}
        yield common | {"ph": "e", "ts": _us(end)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
