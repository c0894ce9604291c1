# SPDX-License-Identifier: Apache-2.0
"""The steps of a timeline, what they consist of, and the waits for loads.

Pure arithmetic over recorded events.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .recorder import Event

Key = tuple[int, int]
"""A step: the process of its scheduler, and a number."""
SeqKey = tuple[int, int]
"""A plan: the process of its scheduler, and its `seq`."""
GPU = ", GPU"
"""The end of the names of tracks whose times are of the device."""


@dataclass
class Step:
    """One step of an engine; all times in seconds.

    Attributes:
        begin: when it was planned.
        end: when its output was there.
        seconds: from the end of the step before to its own, or from its begin if that
            came later: what it takes on top of the others. All of them together are
            the time in which the engine had something to do.
        launch_s: in the call that gives it to the executor; on a CPU, all of it.
        copies_s: for queuing copies, of the slowest rank.
        stall_s: waits for loads, as the ranks reported.
        forward_s: of the slowest rank; on the device, if its times are recorded.
        fences_s: what the device waits for before the forward pass; None: not recorded.
        free: blocks that could be taken, of which `kept` wait for their requests.
        store: blocks of victims that its forward pass waits for; the others likewise.

    """

    key: Key
    begin: float
    end: float
    seconds: float
    schedule_s: float
    counts: dict[str, int]
    launch_s: float = 0.0
    update_s: float = 0.0
    copies_s: float = 0.0
    stall_s: float = 0.0
    forward_s: float = 0.0
    fences_s: float | None = None
    store: int = 0
    clean: int = 0
    load: int = 0
    ahead: int = 0

    @property
    def who(self) -> str:
        """Whether requests join, prefill goes on, or all decode."""
        if self.counts["joined"]:
            return "joins"
        return "prefill goes on" if self.counts["prefill_tokens"] else "decode only"

    @property
    def copies(self) -> str:
        """What the step waits for, and what runs beside it."""
        parts = {
            "victims stored": self.store,
            "loads": self.load,
            "copies beside": self.clean + self.ahead,
        }
        return ", ".join(name for name, n in parts.items() if n) or "no copies"

    @property
    def decodes(self) -> bool:
        """Whether some request decodes in it."""
        return self.counts["decode_tokens"] > 0


@dataclass
class CopyRun:
    """Copies of one kind of one plan on one rank."""

    rank: str
    kind: str
    plan: SeqKey
    blocks: int
    begin: float
    seconds: float


@dataclass
class Waiter:
    """A request that waited for loads, and what was loaded for it."""

    process: int
    request: str
    begin: float
    admitted: float | None = None
    waits: int = 0
    blocks: int = 0
    left: int = 0
    plans: set[int] = field(default_factory=set)
    loads_begin: float | None = None
    loads_end: float | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.begin

    @property
    def late_s(self) -> float | None:
        """From the end of its loads to its admission."""
        if self.admitted is None or self.loads_end is None:
            return None
        return self.admitted - self.loads_end


def within(event: Event, window: tuple[float, float] | None) -> bool:
    return window is None or window[0] <= event.end <= window[1]


def steps_of(
    events: Sequence[Event], window: tuple[float, float] | None = None
) -> list[Step]:
    """The steps that end in a window (seconds) and run something, by their end.

    The engines of several replicas have clocks of their own: a step's time is of its
    own scheduler.
    """
    found: dict[Key, Step] = {}
    plans: dict[SeqKey, Event] = {}
    stalls: dict[SeqKey, float] = defaultdict(float)
    by_seq: dict[SeqKey, Key] = {}
    for e in events:
        if e.name == "plan":
            plans[e.process, e.args["seq"]] = e
        elif e.name == "report":
            for kind, seq, _, seconds in e.args["times"]:
                if kind == "stall":
                    stalls[e.process, seq] += seconds
        elif e.name == "schedule":
            key = _key(e)
            numbers = {k: v for k, v in e.args.items() if isinstance(v, int)}
            found[key] = Step(key, e.begin, 0.0, 0.0, e.seconds, numbers)
            by_seq[e.process, e.args["seq"]] = key
    _add_parts(found, events)
    for plan, key in by_seq.items():
        if (event := plans.get(plan)) is not None:
            for name in ("store", "clean", "load", "ahead"):
                setattr(found[key], name, event.args[name])
        found[key].stall_s = stalls.get(plan, 0.0)
    ended = [s for s in found.values() if s.end]
    _take_turns(ended)
    return [
        step
        for step in sorted(ended, key=lambda step: step.end)
        if step.counts["prefill_tokens"] + step.counts["decode_tokens"]
        and (window is None or window[0] <= step.end <= window[1])
    ]


def _key(event: Event) -> Key:
    process, number = event.args.get("step") or (0, 0)
    return process, number


def _add_parts(found: dict[Key, Step], events: Iterable[Event]) -> None:
    """What the executor and the ranks tell of each step."""
    timed: set[Key] = set()
    for e in events:
        step = found.get(_key(e))
        if step is None:
            continue
        if e.name == "update":
            # The output is there when the scheduler is given it.
            step.end, step.update_s = e.begin, e.seconds
        elif e.name == "execute":
            step.launch_s = e.seconds
        elif e.name == "begin_step":
            step.copies_s = max(step.copies_s, e.seconds)
        elif e.name == "fences":
            step.fences_s = max(step.fences_s or 0.0, e.seconds)
        elif e.name == "forward":
            if e.track.endswith(GPU) and step.key not in timed:
                timed.add(step.key)
                step.forward_s = 0.0
            if e.track.endswith(GPU) or step.key not in timed:
                step.forward_s = max(step.forward_s, e.seconds)


def _take_turns(steps: Iterable[Step]) -> None:
    """What each step takes on top of those before it, scheduler by scheduler."""
    last: dict[int, float] = {}
    for step in sorted(steps, key=lambda step: step.end):
        before = last.get(step.key[0], step.begin)
        step.seconds = step.end - max(before, step.begin)
        last[step.key[0]] = step.end


def copies_of(
    events: Iterable[Event],
    owners: dict[int, int],
    window: tuple[float, float] | None = None,
) -> list[CopyRun]:
    """The copies that end in a window: times of the device where there are any.

    Args:
        events: Of all processes.
        owners: The scheduler's process by that of each rank.
        window: Seconds.

    """
    host: list[CopyRun] = []
    device: list[CopyRun] = []
    for e in events:
        if " copies" in e.track and within(e, window):
            rank = e.track.partition(" copies")[0]
            plan = (owners.get(e.process, 0), e.args["seq"])
            run = CopyRun(rank, e.name, plan, e.args["blocks"], e.begin, e.seconds)
            (device if e.track.endswith(GPU) else host).append(run)
    return device or host


def owners_of(events: Iterable[Event]) -> dict[int, int]:
    """Which scheduler's steps each process carries out."""
    return {e.process: _key(e)[0] for e in events if e.name == "forward"}


def waiters_of(
    events: Iterable[Event],
    copies: Sequence[CopyRun],
    window: tuple[float, float] | None = None,
) -> list[Waiter]:
    """Requests that began to wait for loads in a window, in order."""
    ahead: dict[SeqKey, list[CopyRun]] = defaultdict(list)
    for run in copies:
        if run.kind == "load_ahead":
            ahead[run.plan].append(run)
    waiting: dict[tuple[int, str], Waiter] = {}
    found: list[Waiter] = []
    for e in events:
        if e.track != "waiting" or not within(e, window):
            continue
        key = e.process, str(e.args["request"])
        waiter = waiting.get(key)
        if e.name == "wait":
            if waiter is None:
                waiter = waiting[key] = Waiter(*key, e.begin)
                found.append(waiter)
            waiter.waits += 1
            waiter.blocks = max(waiter.blocks, e.args["blocks"])
            waiter.left = e.args["left"]
            waiter.plans.add(e.args["plan"])
        elif waiter is not None:
            del waiting[key]
            waiter.admitted = e.begin
            _take_loads(waiter, [r for p in waiter.plans for r in ahead[e.process, p]])
    return found


def _take_loads(waiter: Waiter, runs: Sequence[CopyRun]) -> None:
    if runs:
        waiter.loads_begin = min(run.begin for run in runs)
        waiter.loads_end = max(run.begin + run.seconds for run in runs)
