# SPDX-License-Identifier: Apache-2.0
"""Engines of the simulator with many features at once, and which of them met.

Two features of an engine have met when both did what they are there for while its
requests had blocks from the host. A feature of requests has met those of their engine
when such a request found something cached, and another one when one request had both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

from tests.pairs.features import CODES, Pair
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads
from vllm.v1.kv_tier.keeper.partition import Partition
from vllm.v1.request import Request

from . import upstream
from .engine import Engine
from .layouts import (
    Layout,
    chunked,
    chunked_as_full,
    full,
    mamba,
    mla,
    mla_window,
    shards,
    speculating,
    window,
)
from .pages import Elastic
from .scheduler import NUM_DRAFTS, Setup
from .scripts import DOCUMENTS, MAX_MODEL_LEN, random_setup
from .shared_pool import Machine
from .test_events import FollowedEngine

STORES = frozenset(("FS", "RD", "MC"))
"""Below the host. The scheduler sees the same of all; here a simulated one stands for
them, and `unit/test_store_contract.py` has each real one do what it does."""

KINDS: dict[frozenset[str], Layout] = {
    frozenset(codes.split()): layout
    for codes, layout in {
        "": Layout("full", (full(),), 4),
        "SW": Layout("full+window", (full(), window(6)), 4),
        "MB": Layout("full+mamba", (full(), mamba()), 4),
        "CL": Layout("full+chunked", (full(), chunked(8)), 4),
        "ML": Layout("MLA", (mla(),), 4),
        "MB PB": Layout("full+mamba, partial hits", (full(8), mamba(8)), 2),
        "DC": Layout("full, two shards", (shards(full(2), 2),), 4, num_shards=2),
        "SW MB": Layout("full+window+mamba", (full(), window(6), mamba()), 4),
        "SW CL": Layout("full+window+chunked", (full(), window(6), chunked(8)), 4),
        "SW ML": Layout("MLA+MLA window", (mla(8), mla_window(9, 4)), 4),
        "MB CL": Layout("full+chunked+mamba", (full(), chunked(8), mamba()), 4),
        "MB ML": Layout("MLA+mamba", (mla(), mamba()), 4),
        "CL ML": Layout("MLA+chunked", (mla(), chunked(8)), 4),
        "MB ML PB": Layout("MLA+mamba, partial hits", (mla(8), mamba(8)), 2),
        "DC ML": Layout("MLA, two shards", (shards(mla(2), 2),), 4, num_shards=2),
        "DC MB": Layout(
            "full+mamba, two shards", (shards(full(2), 2), mamba()), 4, num_shards=2
        ),
        # Hits end inside of blocks where those of windows are as fine as hashes.
        "SW MB PB": Layout(
            "full+window+mamba, partial hits", (full(8), window(6, 2), mamba(8)), 2
        ),
        "MB CL PB": Layout(
            "full+chunked+mamba, partial hits", (full(8), chunked(8, 2), mamba(8)), 2
        ),
        "DC MB PB": Layout(
            "full+mamba, two shards, partial hits",
            (shards(full(4), 2), mamba(8)),
            2,
            num_shards=2,
        ),
    }.items()
}
"""Layouts of KV cache groups by the features that they have."""

CHUNKED_AS_FULL = Layout("chunked as full", (chunked_as_full(8),), 4)
"""Of chunked local attention with EAGLE: upstream has one kind of blocks then."""

OF_KINDS = frozenset().union(*KINDS)
OF_RANKS = frozenset({"VE", "SH", "TP"})
OF_ENGINES = (
    frozenset({"WB", "WT", "QU", "EL", "NG", "EA", "PD", "PP", "EV", "PO", "OP"})
    | STORES
    | OF_KINDS
    | OF_RANKS
)
OF_REQUESTS = frozenset(
    {"RL", "RT", "PW", "TN", "CA", "LO", "LR", "PE", "NN", "PL", "MM"}
)
SIMULATED = OF_ENGINES | OF_REQUESTS

_HINTS = frozenset(["RL", "RT", "PW", "TN", "CA"])
_EXCLUDE: list[tuple[set[str], set[str]]] = [
    # One setting, one value.
    ({"WB"}, {"WT"}),
    ({"NG"}, {"EA"}),
    # Refused, see `tests.pairs.refusals`.
    ({"PO"}, {"NN", "PL", *_HINTS}),
    ({"DC"}, {"SW", "CL"}),
    # Refused as well.
    ({"PD"}, {"DC"}),
    ({"OP"}, {"EL", "DC", "SH"}),
    # `test_pool_events` follows engines of a pool, `test_shared_pool` has engines of
    # several ranks, and `e2e/test_pool.py` real ones, checksums, and adapters, whose
    # loads all engines of a process count together.
    ({"OP"}, {"EV", "TP", "LR", "VE"}),
    # Real ranks have no store here: `e2e/test_pairs.py` has them.
    (set(STORES), {"VE", "SH", "TP"}),
]
EXCLUDED = {
    tuple(sorted(pair, key=CODES.index))
    for some, others in _EXCLUDE
    for pair in product(some, others)
}


def drawn() -> set[Pair]:
    """The pairs that the simulator must have had."""
    return _pairs(SIMULATED) - EXCLUDED  # type: ignore[operator]


def _pairs(codes: Any) -> set[Pair]:
    return set(combinations(sorted(codes, key=CODES.index), 2))


def _fits(codes: set[str], code: str) -> bool:
    together = {*codes, code}
    if {"PP", "MB"} <= together and together & {"NG", "EA"}:
        # All three are refused: stages hear too late which guesses were right.
        return False
    if {"EV", "PB", "EA"} <= together and not upstream.HASHES_LOOKAHEAD:
        # Upstream describes a state by the whole block or by its last tokens, and the
        # follower takes that for a change. Any two of the three meet.
        return False
    return not any(pair in EXCLUDED for pair in _pairs(together))


def draw(rng: Random, missing: set[Pair]) -> set[str]:
    """Features of an engine and its requests that fit together, with at least one pair
    that is missing."""
    codes = set(rng.choice(sorted(missing)))
    for code in rng.sample(sorted(SIMULATED), len(SIMULATED)):
        if rng.random() < (0.7 if len(missing) > 20 else 0.3) and _fits(codes, code):
            kind = (codes | {code}) & OF_KINDS
            if any(kind <= has for has in KINDS):
                codes.add(code)
    if {"EA", "CL"} <= codes:
        codes -= OF_KINDS - {"CL"}
    kind = frozenset(codes & OF_KINDS)
    # The smallest layout that has them; what it has besides must fit as well.
    for has in sorted(KINDS, key=len):
        if kind <= has and all(_fits(codes, code) for code in has):
            codes |= has
            break
    else:
        return draw(rng, missing)
    if "SH" in codes:
        codes.add("TP")
    if not codes & {"WB", "WT"}:
        codes.add(rng.choice(["WB", "WT"]))
    if codes & STORES:
        codes |= STORES
    fits = all(_fits(codes, code) for code in codes)
    return codes if fits else draw(rng, missing)


def setup_of(codes: set[str], rng: Random) -> Setup:
    """An engine with the features among `codes` that are not of requests."""
    setup = random_setup(rng)
    speculates = "ngram" if "NG" in codes else "eagle" if "EA" in codes else None
    layout = KINDS[frozenset(codes & OF_KINDS)]
    if speculates:
        layout = speculating(layout, NUM_DRAFTS)
    runs_ahead = not codes & {"NG", "EA", "PO"}
    setup = replace(
        setup,
        layout=CHUNKED_AS_FULL if {"EA", "CL"} <= codes else layout,
        store_policy="write_through" if "WT" in codes else "write_back",
        store_from_use=1,
        num_slots=rng.randint(10, 40),
        # Upstream counts too few blocks for states behind what a connector loads, and
        # a small cache ends in an exception, also where the host is never found.
        spare_blocks=rng.randint(0, 6) + (120 if {"PD", "MB"} <= codes else 0),
        # An image has to fit a step.
        token_budget=rng.randint(8, 24),
        is_async=setup.is_async and runs_ahead,
        quotas=(("a", 0.25), ("b", 0.25)) if "QU" in codes else (),
        num_stages=3 if "PP" in codes else 1,
        speculates=speculates,
        remote=rng.randrange(999) if "PD" in codes else None,
        real_ranks=2 if codes & {"SH", "TP"} else int("VE" in codes),
        verify="VE" in codes,
        share="SH" in codes,
        pools="PO" in codes,
    )
    if "EL" in codes:
        pages = rng.choice([1, 2, 3, 5]), rng.choice([0, 1, 5])
        setup = replace(setup, elastic=Elastic(rng.randrange(999), *pages))
    if codes & STORES:
        tuning = replace(setup.tuning, fetch_part=1.0, assumed_prefill_s=1e3)
        num_slots = 4 + setup.num_slots // 4
        below = (rng.randrange(100), rng.randint(0, 3))
        setup = replace(setup, below=below, num_slots=num_slots, tuning=tuning)
    return setup


class _Meeting:
    """An engine at work, and what its requests have.

    Args:
        codes: Features of both.
        rng: What they do.

    """

    def __init__(self, codes: set[str], rng: Random) -> None:
        self._codes = codes
        self._rng = rng
        setup = setup_of(codes, rng)
        self._machine: Machine | None = None
        self.engine: Engine
        if "EV" in codes:
            self.engine = FollowedEngine(setup)
        elif "OP" in codes:
            self._machine = Machine(setup, 2, Partition, 0.0, rng)
            self.engine = self._machine.engines[0]
        else:
            self.engine = Engine(setup)
        self._requests: list[tuple[Engine, Request, set[str]]] = []

    def play(self, num_actions: int) -> None:
        rng, engine = self._rng, self.engine
        for _ in range(num_actions):
            if self._machine is not None:
                engine = self.engine = rng.choice(self._machine.engines)
            kind = rng.random()
            if kind < 0.45:
                self._ask()
            elif kind < 0.55 and "LR" in self._codes:
                engine.reload_adapter()
            else:
                for _ in range(rng.randint(1, 6)):
                    engine.step(
                        rush=rng.random() < 0.5,
                        # Real ranks refuse what fails to load.
                        fail=rng.choice([*[None] * 20, "load", "load", "store"]),
                        abort=rng.choice([*[None] * 30, 0]),
                    )
        if self._machine is not None:
            self._machine.drain()
        else:
            engine.drain()

    def _has(self, code: str, likely: float = 0.7) -> bool:
        return code in self._codes and self._rng.random() < likely

    def _ask(self) -> None:
        rng, codes = self._rng, set()
        asked = {code for code in sorted(OF_REQUESTS) if self._has(code)}
        hints: dict[str, Any] = {}
        if "RL" in asked:
            hints |= {"conversation": rng.choice("abc"), "release": rng.random() < 0.5}
        if "RT" in asked:
            hints["retain"] = [{"priority": rng.choice([30, 80, 100]), "ttl": 20}]
        if "PW" in asked:
            hints["prewarm"] = True
        if "TN" in asked:
            hints["tenant"] = rng.choice("abc")
        if "CA" in asked:
            hints[rng.choice(["max_load_tokens", "max_offload_tokens"])] = 8
            hints["store"] = rng.random() < 0.5
        codes |= asked
        if "LR" in asked:
            codes.add("LO")
        use_lora = "LO" in codes
        if use_lora and not self.engine.adapter_load:
            codes.discard("LR")
        if "PL" in asked and rng.random() < 0.5:
            # It reads nothing that is cached, for others to find what it has computed.
            codes.discard("PL")
        document = rng.choice(DOCUMENTS)[: rng.choice([8, 12, 16, 20, 24])]
        suffix = [rng.randrange(1, 15) for _ in range(rng.randint(0, 4))]
        for _ in range(rng.randint(2, 3) if "NN" in codes else 1):
            request = self.engine.add(
                [*document, *suffix][: MAX_MODEL_LEN - 2],
                rng.randint(1, 8),
                salt="a"
                if rng.random() < (0.6 if "QU" in self._codes else 0.2)
                else None,
                use_lora=use_lora,
                hints=hints or None,
                image=rng.randint(1, 2) if "MM" in codes else 0,
                is_embedded="PE" in codes,
                prompt_logprobs="PL" in codes,
            )
            self._requests.append((self.engine, request, codes))

    def met(self) -> set[Pair]:
        engine, events, codes = self.engine, self.engine.events, self._codes
        if self._machine is not None:
            events = self._machine.events
        if not events["loaded"]:
            return set()
        below, ranks = engine.below, engine._worker.real_ranks
        has_loaded = ranks is not None and ranks.num_loads > 0
        acted = {
            "QU": bool(events["of tenants"]),
            "EL": bool(events["unmapped"]),
            # Whoever pools has nothing to guess.
            "NG": bool(events["accepted"]) or "PO" in codes,
            "EA": bool(events["accepted"]) or "PO" in codes,
            "PD": engine._worker.num_remote > 0,
            "VE": ranks is not None and ranks.num_refused > 0,
            "TP": has_loaded,
            "SH": has_loaded,
            "OP": bool(events["from neighbours"]),
            "EV": isinstance(engine, FollowedEngine) and engine.num_compared > 0,
            "PB": any(
                num_tokens % engine.setup.layout.block_size
                for num_tokens in engine.num_cached.values()
            ),
        }
        acted |= dict.fromkeys(STORES, below is not None and below.num_got > 0)
        of_engine = {c for c in codes & OF_ENGINES if acted.get(c, True)}
        found = _pairs(of_engine)
        for asked, request, has in self._requests:
            # Whoever wants logprobs of a prompt computes all of it.
            num_cached = asked.num_cached.get(request.request_id, 0)
            if num_cached > 0 or "PL" in has:
                found |= _pairs(has)
                found |= _pairs(of_engine | has) - _pairs(of_engine)
        return found - EXCLUDED  # type: ignore[operator]


@contextmanager
def _counted_loads() -> Iterator[None]:
    set_adapter_loads(AdapterLoads())
    try:
        yield
    finally:
        set_adapter_loads(None)


def meet(codes: set[str], rng: Random, num_actions: int = 60) -> set[Pair]:
    """Play a script in which `codes` are on; the pairs that met."""
    with _counted_loads():
        meeting = _Meeting(codes, rng)
        try:
            meeting.play(num_actions)
            return meeting.met()
        finally:
            if isinstance(meeting.engine, FollowedEngine):
                meeting.engine.close()


__all__ = ["KINDS", "SIMULATED", "draw", "drawn", "meet", "upstream"]
