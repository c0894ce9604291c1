# SPDX-License-Identifier: Apache-2.0
"""Tables of a timeline: where the time of steps goes, the copies, and the waits."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from .steps import CopyRun, Step, Waiter
from .table import markdown, number

HEADER = [
    "steps",
    "number",
    "share of time",
    "ms, median (90% under; longest)",
    "schedule ms",
    "launch ms",
    "queue copies ms",
    "forward ms",
    "wait for loads, mean ms",
    "fences, mean ms",
    "decoding",
]


def tables(
    steps: Sequence[Step],
    copies: Sequence[CopyRun],
    waiters: Sequence[Waiter],
    no_room: int = 0,
) -> Iterator[str]:
    """The parts of a report, in markdown.

    Args:
        steps: As `steps_of` gives them; `copies` and `waiters` likewise.
        copies: See there.
        waiters: See there.
        no_room: How often a request found too few free blocks for its loads.

    """
    busy = sum(step.seconds for step in steps)
    decoding = [step for step in steps if step.decodes]
    if not decoding:
        yield "No step decoded."
        return
    yield (
        f"{len(steps)} steps in {number(busy)} s of work; {len(decoding)} of them "
        f"decode, {number(sum(s.seconds for s in decoding))} s. A step's time is from "
        "the end of the one before; parts that run beside others add up to more. "
        "Medians, if not said otherwise."
    )
    prefill = [step for step in steps if step.counts["prefill_tokens"]]
    yield (
        f"{number(sum(s.counts['prefill_tokens'] for s in prefill))} tokens of prompts "
        f"in {len(prefill)} steps of {number(sum(s.seconds for s in prefill))} s. "
        f"Forward passes take {number(sum(s.forward_s for s in steps))} s of all steps."
    )
    yield "### Steps that decode, by what differs"
    yield markdown(HEADER, [row(name, some, busy) for name, some in split(decoding)])
    yield "### Steps that decode, by class"
    yield markdown(HEADER, [row(name, some, busy) for name, some in classes(decoding)])
    if others := [step for step in steps if not step.decodes]:
        yield "### Steps of prefill alone"
        yield markdown(
            HEADER, [row(name, some, busy) for name, some in classes(others)]
        )
    yield "### Free blocks, and requests"
    yield markdown(["", "mean", "median", "least", "most"], list(levels(steps)))
    if copies:
        yield "### Copies"
        yield markdown(COPIES, list(copy_rows(copies)))
    if waiters:
        yield "### Requests that waited for loads"
        yield waits(waiters)
    if no_room:
        yield f"{no_room} times a request found too few free blocks for its loads."


def split(steps: Sequence[Step]) -> Iterator[tuple[str, list[Step]]]:
    """Each question that can be asked of a step, and the steps by its answer."""
    questions: dict[str, Callable[[Step], bool]] = {
        "a request joins": lambda step: step.counts["joined"] > 0,
        "some prefill": lambda step: step.counts["prefill_tokens"] > 0,
        "victims are stored": lambda step: step.store > 0,
        "loads in the step": lambda step: step.load > 0,
        "stores beside it": lambda step: step.clean > 0,
        "loads ahead beside it": lambda step: step.ahead > 0,
    }
    for name, asked in questions.items():
        yes = [step for step in steps if asked(step)]
        no = [step for step in steps if not asked(step)]
        if yes:
            yield name, yes
            yield f"not: {name}", no


def classes(steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """The steps by who is in them and what they copy, those that took most first."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        found.setdefault(f"{step.who}; {step.copies}", []).append(step)
    return sorted(found.items(), key=lambda item: -sum(s.seconds for s in item[1]))


def row(name: str, steps: Sequence[Step], busy_s: float) -> list[str]:
    """A row of `HEADER`. `busy_s` is the time of all steps."""
    if not steps:
        return [name, "0", *[""] * (len(HEADER) - 2)]
    times = sorted(step.seconds for step in steps)
    most = times[min(len(times) - 1, int(0.9 * len(times)))]
    fences = [step.fences_s for step in steps if step.fences_s is not None]

    def median(of: Callable[[Step], float]) -> str:
        return number(1e3 * statistics.median(map(of, steps)))

    return [
        name,
        str(len(steps)),
        f"{sum(times) / busy_s:.0%}" if busy_s else "",
        f"{number(1e3 * statistics.median(times))} ({number(1e3 * most)}; "
        f"{number(1e3 * times[-1])})",
        median(lambda step: step.schedule_s),
        median(lambda step: step.launch_s),
        median(lambda step: step.copies_s),
        median(lambda step: step.forward_s),
        number(1e3 * statistics.mean(step.stall_s for step in steps)),
        number(1e3 * statistics.mean(fences)) if fences else "not recorded",
        number(statistics.median(step.counts["decode_tokens"] for step in steps)),
    ]


def levels(steps: Sequence[Step]) -> Iterator[list[str]]:
    """Numbers of each step; their mean is over the time that steps take."""
    busy = sum(step.seconds for step in steps)
    names = {
        "running": "requests that run",
        "waiting": "requests that wait",
        "free": "free blocks",
        "kept": "of these, kept for requests that wait for loads",
    }
    for key, name in names.items():
        found = [step.counts[key] for step in steps]
        mean = sum(step.seconds * step.counts[key] for step in steps) / busy
        values = (mean, statistics.median(found), min(found), max(found))
        yield [name, *map(number, values)]


COPIES = ["rank, kind", "copies", "blocks", "ms, median (longest)", "blocks/s"]


def copy_rows(copies: Sequence[CopyRun]) -> Iterator[list[str]]:
    groups: dict[str, list[CopyRun]] = {}
    for run in copies:
        groups.setdefault(f"{run.rank}, {run.kind}", []).append(run)
    for name, runs in sorted(groups.items()):
        times = [run.seconds for run in runs]
        blocks, total = sum(run.blocks for run in runs), sum(times)
        yield [
            name,
            str(len(runs)),
            number(blocks),
            f"{number(1e3 * statistics.median(times))} ({number(1e3 * max(times))})",
            number(blocks / total) if total else "",
        ]


def waits(waiters: Sequence[Waiter]) -> str:
    """How long requests waited for loads, and the longest waits."""
    ended = [(w.seconds, w) for w in waiters if w.seconds is not None]
    late = [w.late_s for w in waiters if w.late_s is not None]
    text = f"{len(waiters)} began to wait, {len(ended)} were admitted"
    if ended:
        text += f", after {number(1e3 * statistics.median(s for s, _ in ended))} ms"
    if late:
        text += (
            f"; {number(1e3 * statistics.median(late))} ms after the last of their "
            f"loads ahead had ended (longest {number(1e3 * max(late))} ms; below 0: it "
            "had not)"
        )
    header = ["request", "waited ms", "waits", "blocks held", "left to its step"]
    header += ["loads began, ms", "loads ended, ms"]
    longest = sorted(ended, key=lambda pair: -pair[0])[:5]
    rows = [
        [
            waiter.request,
            number(1e3 * seconds),
            str(waiter.waits),
            str(waiter.blocks),
            str(waiter.left),
            _after(waiter, waiter.loads_begin),
            _after(waiter, waiter.loads_end),
        ]
        for seconds, waiter in longest
    ]
    return (
        f"{text}. The longest, with times from the begin of the wait:\n\n"
        + markdown(header, rows)
    )


def _after(waiter: Waiter, at: float | None) -> str:
    return "not seen" if at is None else number(1e3 * (at - waiter.begin))
