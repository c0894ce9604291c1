# SPDX-License-Identifier: Apache-2.0
"""Workloads that do harm to the host tier; they run only where there is one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .engine import Engine
from .harm import (
    break_copy,
    count_reads,
    fill_with_nans,
    lose_no_reports,
    lose_store_reports,
    mend_copy,
    spoil_first_load,
    spoil_slot,
    stop_spoiling,
)
from .workloads import embed, fill_device, overcommit, talk, workload


@workload
def corrupt_slot(engine: Engine) -> dict[str, Any]:
    """One byte row of one host slot is wrong when a conversation needs it.

    Asks what `conversations` asks.
    """
    victim: list[int] = []
    reads: list[int] = []

    def between_turns(turn: int) -> None:
        if turn == 1:
            fill_device(engine)
            victim.append(engine.oldest_slot())
            engine.on_ranks(spoil_slot, victim[0])
            reads.append(engine.on_ranks(count_reads, victim[0])[0])

    answers = talk(engine, between_turns)
    (reads_after,) = set(engine.on_ranks(count_reads, victim[0]))
    return {"answers": answers, "reads": reads_after - reads[0]}


@workload
def nan_slot(engine: Engine) -> dict[str, Any]:
    """As `corrupt_slot`, with a slot full of NaNs, which `verify` must refuse: a load
    would leave them in a device block."""

    def between_turns(turn: int) -> None:
        if turn == 1:
            fill_device(engine)
            engine.on_ranks(fill_with_nans, engine.oldest_slot())

    with refused_loads(engine) as found:
        answers = talk(engine, between_turns)
    return {"answers": answers, **found}


@workload
def corrupt_slot_refused(engine: Engine) -> dict[str, Any]:
    """`corrupt_slot`, and what became of its loads."""
    with refused_loads(engine) as found:
        result = corrupt_slot(engine)
    return {**result, **found}


@contextmanager
def refused_loads(engine: Engine) -> Iterator[dict[str, Any]]:
    """Number of reports of failed loads that reach the scheduler meanwhile, and what
    a rank in this process logs of them."""
    found: dict[str, Any] = {"failed_loads": 0, "log": []}
    apply_report = engine.pool.apply_report

    def count(report: Any) -> int | None:
        void_plan = apply_report(report)
        found["failed_loads"] += void_plan is not None
        return void_plan

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["log"].append(self.format(record))

    handler = Keep()
    logger = logging.getLogger("vllm.v1.kv_tier.worker.copies")
    logger.addHandler(handler)
    engine.pool.apply_report = count
    try:
        yield found
    finally:
        del engine.pool.apply_report
        logger.removeHandler(handler)


@workload
def corrupt_each_group(engine: Engine) -> dict[str, Any]:
    """One slot is wrong when it is loaded, of each KV cache group in turn.

    Asks for each what `conversations` asks.
    """
    results: list[dict[str, Any]] = []
    for group, spec in enumerate(engine.groups):
        assert engine.reset()

        def between_turns(turn: int, group: int = group) -> None:
            if turn == 1:
                engine.on_ranks(spoil_first_load, engine.slots_of(group))

        answers = talk(engine, between_turns)
        spoilt = engine.on_ranks(stop_spoiling)
        results.append({"group": spec, "answers": answers, "spoilt": spoilt})
    return {"groups": results}


@workload
def corrupt_each_rank(engine: Engine) -> dict[str, Any]:
    """One slot is wrong on one rank when it is loaded, on each rank in turn.

    Asks for each what `conversations` asks.
    """
    results: list[dict[str, Any]] = []
    for rank in range(engine.facts["world_size"]):
        assert engine.reset()

        def between_turns(turn: int, rank: int = rank) -> None:
            if turn == 1:
                engine.on_ranks(spoil_first_load, engine.slots_of(group=0), rank)

        answers = talk(engine, between_turns)
        spoilt = engine.on_ranks(stop_spoiling)
        results.append({"answers": answers, "spoilt": spoilt})
    return {"ranks": results}


@workload
def corrupt_embeddings(engine: Engine) -> dict[str, Any]:
    """One slot is wrong when it is loaded. Asks what `embeddings` asks."""

    def before_round(number: int) -> None:
        if number == 1:
            engine.on_ranks(spoil_first_load, engine.slots_of(group=0))

    result = embed(engine, before_round)
    return {**result, "spoilt": engine.on_ranks(stop_spoiling)}


@workload
def load_fails(engine: Engine) -> dict[str, Any]:
    """One load fails on the last rank. Asks what `conversations` asks."""
    engine.on_ranks(break_copy, "loads", 2)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def load_fails_in_a_crowd(engine: Engine) -> dict[str, Any]:
    """One load fails while other requests run. Asks what `overcommit` asks."""
    engine.on_ranks(break_copy, "loads", 0)
    answers = overcommit(engine)["answers"]
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def store_report_is_lost(engine: Engine) -> dict[str, Any]:
    """One store fails, and the scheduler never hears of it. Asks what `conversations`
    asks."""
    engine.on_ranks(break_copy, "stores", 3)
    engine.on_ranks(lose_store_reports)
    answers = talk(engine)
    engine.on_ranks(lose_no_reports)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def store_fails(engine: Engine) -> dict[str, Any]:
    """One store fails on the last rank. Asks what `conversations` asks."""
    engine.on_ranks(break_copy, "stores", 3)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def load_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """As `load_fails`. With a pipeline, this rank's outputs go to no scheduler."""
    engine.on_ranks(break_copy, "loads", 2, 0)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def store_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """As `store_fails`."""
    engine.on_ranks(break_copy, "stores", 3, 0)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def embeddings_load_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """One load fails on the first rank. Asks what `embeddings` asks."""
    engine.on_ranks(break_copy, "loads", 2, 0)
    return {**embed(engine), "failures": engine.on_ranks(mend_copy, "loads")}
