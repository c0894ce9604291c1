# SPDX-License-Identifier: Apache-2.0
"""What users and luck do to an engine."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from vllm.v1.kv_tier.policy import POLICIES
from vllm.v1.kv_tier.tuning import SchedulingTuning

from .content import VOCAB, Violation
from .engine import Engine
from .layouts import LAYOUTS, MAX_MODEL_LEN
from .scheduler import TUNING, Setup

EXAMPLES = int(os.environ.get("KV_TIER_SIM_EXAMPLES", "500"))
SEED = int(os.environ.get("KV_TIER_SIM_SEED", "0"))
# Prompts begin with one of these. The second leaves the first halfway.
_FIRST = [(7 * i) % 15 + 1 for i in range(24)]
DOCUMENTS = (
    _FIRST,
    _FIRST[:12] + [(5 * i) % 13 + 2 for i in range(12)],
    [(11 * i) % 14 + 1 for i in range(24)],
)


@dataclass(frozen=True)
class Add:
    """A request arrives."""

    base: int
    """Document that the prompt begins with; beyond their number, an ended
    request, whose tokens the prompt repeats whole."""
    length: int
    """How much of the document."""
    suffix: int
    """Tokens that follow, and which."""
    max_tokens: int
    has_salt: bool = False
    use_lora: bool = False
    priority: int = 0
    copies: int = 1
    hints: dict[str, Any] | None = None

    def run(self, engine: Engine) -> None:
        base = DOCUMENTS[self.base % len(DOCUMENTS)][: self.length]
        past = self.base - len(DOCUMENTS)
        if past >= 0 and engine.finished:
            base = engine.finished[-1 - past % len(engine.finished)].truth.tokens
        suffix = [(self.suffix * i + i) % VOCAB for i in range(self.suffix)]
        prompt = [*base, *suffix][: MAX_MODEL_LEN - 2] or [1]
        salt = "a" if self.has_salt else None
        for _ in range(self.copies):
            engine.add(
                prompt.copy(),
                self.max_tokens,
                salt,
                self.use_lora,
                self.priority,
                self.hints,
            )


@dataclass(frozen=True)
class Steps:
    """The engine runs a while; the abort comes during the first step."""

    count: int
    rush: bool = False
    fail: str | None = None
    abort: int | None = None

    def run(self, engine: Engine) -> None:
        for i in range(self.count):
            engine.step(self.rush, self.fail, self.abort if i == 0 else None)


@dataclass(frozen=True)
class Abort:
    """A client goes away between two steps."""

    number: int

    def run(self, engine: Engine) -> None:
        engine.abort(self.number)


@dataclass(frozen=True)
class Reset:
    """The prefix cache is reset."""

    running: bool

    def run(self, engine: Engine) -> None:
        engine.reset(self.running)


@dataclass(frozen=True)
class Resize:
    """An operator changes the size of the host."""

    num_slots: int

    def run(self, engine: Engine) -> None:
        engine.resize(self.num_slots)


Action = Add | Steps | Abort | Reset | Resize


@dataclass(frozen=True)
class Script:
    setup: Setup
    actions: list[Action]

    def __str__(self) -> str:
        actions = [f"    {action}," for action in self.actions if action != _IDLE]
        return "\n".join([f"Script({self.setup}, [", *actions, "])"])

    def play(self) -> Engine:
        engine = Engine(self.setup)
        for action in self.actions:
            action.run(engine)
        engine.drain()
        return engine


def random_setup(rng: Random) -> Setup:
    return Setup(
        layout=rng.choice(LAYOUTS),
        spare_blocks=rng.randint(0, 10),
        num_slots=rng.randint(1, 40),
        store_policy=rng.choice(["write_back", "write_through"]),
        store_from_use=rng.choice([1, 1, "auto", "auto"]),
        eviction_policy=rng.choice(list(POLICIES)),
        load_time=rng.choice([0, 0.2, 0.5, 1, 2]),
        max_stall=rng.choice([0, 0, 1, 3]),
        is_async=rng.random() < 0.5,
        is_v2=rng.random() < 0.5,
        token_budget=rng.randint(4, 24),
        max_num_seqs=rng.randint(2, 6),
        by_priority=rng.random() < 0.5,
        retention=rng.choice([None, None, 0, 2]),
        reserve_full_isl=rng.random() < 0.5,
        join_time=rng.choice([0, 0, 1, 3]),
        tuning=random_tuning(rng),
        # The first is a cache salt, too.
        quotas=rng.choice([(), (), (("a", 0.3),), (("a", 0.25), ("b", 0.75))]),
    )


def random_tuning(rng: Random) -> SchedulingTuning:
    """Numbers that suit this small engine, extreme ones among them."""
    choose = rng.choice
    return replace(
        TUNING,
        num_recent=choose([0, 2, 16]),
        max_waits=choose([0, 1, 4]),
        min_prefetch=choose([1, 1, 2, 4]),
        max_prefetch=choose([1, 3, 2048]),
        max_page_looks=choose([1, 8, 8192]),
        spare=choose([0.0, 0.0, 0.1, 0.3]),
        claim_within_s=choose([0.0, 1.0, 5.0]),
        min_stores=choose([0, 1, 128]),
        idle_stores=choose([0, 1, 256]),
        stores_during_loads=choose([0, 1, 32]),
        min_looks=choose([0, 4, 512]),
        looks_during_loads=choose([0, 4, 128]),
        clean_part=choose([0.0, 0.3, 0.75, 1.0]),
        clean_s=choose([0.0, 3.0, 1000.0]),
        clean_loads=choose([0.0, 1.0, 4.0]),
        load_rate_decay=choose([0.0, 0.5, 1.0]),
        recheck_steps=choose([0, 3, 1000]),
        clean_batch=choose([0, 1, 16]),
        alloc_rate_decay=choose([0.0, 0.9]),
        shadow_slots=choose([1, 4, 256]),
        uses_per_choice=choose([1, 5, 20]),
        choosy_gain=choose([0.0, 1.1]),
        choosy_hits=choose([0.0, 16.0]),
        hits_kept=choose([0.0, 0.8]),
        max_failed_loads=choose([1, 3, 1000]),
        retry_loads_s=choose([0.0, 3.0, 10.0]),
        first_fetch=choose([1, 4]),
        num_fetches=choose([1, 5]),
        fetch_job_s=choose([0.0, 5.0, 100.0]),
        patience_s=choose([0.0, 3.0]),
        retry_store_s=choose([0.0, 3.0, 30.0]),
        remeasure_s=choose([0.0, 3.0, 10.0]),
    )


def random_hints(rng: Random) -> dict[str, Any] | None:
    if rng.random() < 0.5:
        return None
    hints: dict[str, Any] = {"release": rng.random() < 0.4}
    if rng.random() < 0.7:
        # The last is no name.
        hints["conversation"] = rng.choice(["a", "b", "c", 4])
    if rng.random() < 0.6:
        hints["retain"] = [random_range(rng) for _ in range(rng.choice([1, 1, 3]))]
    if rng.random() < 0.3:
        hints["tenant"] = rng.choice(["a", "b", "c"])
    if rng.random() < 0.2:
        hints["store"] = rng.random() < 0.3
    for cap in ("max_load_tokens", "max_offload_tokens"):
        if rng.random() < 0.15:
            hints[cap] = rng.choice([0, 4, 8, 100])
    if rng.random() < 0.2:
        hints["prewarm"] = True
    return hints


def random_range(rng: Random) -> dict[str, Any]:
    start = rng.choice([0, 0, 0, 5, 12])
    return {
        # All of one priority, now and then: a flood.
        "priority": rng.choice([0, 30, 50, 60, 100, 100, 100]),
        # In steps.
        "ttl": rng.choice([None, 1, 3, 8]),
        "start": start,
        "end": rng.choice([None, None, start + 4, start + 11]),
        "answer": rng.random() < 0.3,
    }


def random_action(rng: Random) -> Action:
    kind = rng.random()
    if kind < 0.4:
        return Add(
            base=rng.randint(0, 5),
            length=rng.choice([3, 8, 12, 13, 16, 18, 20, 24]),
            suffix=rng.randint(0, 6),
            max_tokens=rng.randint(1, 10),
            has_salt=rng.random() < 0.1,
            use_lora=rng.random() < 0.1,
            priority=rng.randint(0, 2),
            copies=rng.choice([1, 1, 1, 1, 2, 3]),
            hints=random_hints(rng),
        )
    if kind < 0.95:
        return Steps(
            count=rng.randint(1, 8),
            rush=rng.random() < 0.5,
            fail=rng.choice([*[None] * 16, "load", "load", "store", "compute"]),
            abort=rng.choice([*[None] * 12, rng.randint(0, 5)]),
        )
    if kind < 0.98:
        return Abort(rng.randint(0, 5))
    return Reset(running=rng.random() < 0.5)


def random_script(rng: Random) -> Script:
    return Script(random_setup(rng), [random_action(rng) for _ in range(30)])


_IDLE = Steps(0)

# One number for an action: cheap to draw. Shrinking idles what is not needed.
_NUMBERS = st.integers(0, 2**24)


def _drawn_setup(number: int) -> Setup:
    setup = random_setup(Random(number))
    # Else hardly a request is preempted where each needs few blocks.
    return replace(setup, spare_blocks=0) if number % 2 else setup


def _drawn_action(number: int) -> Action:
    if not number:
        return _IDLE
    # Among the others too rare for the few scripts of each layout.
    if number % 128 == 1:
        return Reset(running=True)
    return random_action(Random(number))


def scripts(**setup: Any) -> st.SearchStrategy[Script]:
    """Scripts on engines of which `setup` is given and the rest is drawn."""
    return st.builds(
        Script,
        _NUMBERS.map(lambda n: replace(_drawn_setup(n), **setup)),
        st.lists(
            _NUMBERS.map(_drawn_action),
            min_size=20,
            max_size=40,
        ),
    )


def play_part(make: Callable[[int], Script], part: int, of: int) -> Counter[str]:
    """The events of one of `of` parts of the scripts that `make` gives for seeds."""
    events: Counter[str] = Counter()
    for seed in range(SEED + part, SEED + EXAMPLES, of):
        script = make(seed)
        try:
            events.update(script.play().events)
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}\n{script}")
    return events
