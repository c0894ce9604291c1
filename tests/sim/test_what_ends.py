# SPDX-License-Identifier: Apache-2.0
"""What a request began ends with it: it is aborted at every step of its life, and the
tables of an engine that has nothing to do are compared with those of a new one."""

import gc
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

from vllm.config import KVEventsConfig
from vllm.v1.kv_tier.elastic.pool import ElasticBlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from . import upstream
from .engine import Engine
from .layouts import LAYOUTS
from .pages import Elastic
from .remote import Remote
from .scheduler import TUNING, Setup
from .scripts import DOCUMENTS
from .stream_play import collect_fast as collect_fast
from .tables import put_in, sizes, tables

CACHED = re.compile(
    r"pool\.(host\.(_free|_parts\[\d+\]|_several|_next|_released|_policy\b.*"
    r"|listeners\[\d\]\._known)"
    r"|secondary\.(fetches\._came_from|tiers\[\d\]\.presence\.keys)"
    r"|admission\b.*|conversations\._sole_users\b.*|retention\.(key_hints|hinted)\b.*"
    r"|conversations\._turns\b.*|host_writer\.(released|forbidden)|elastic\.(unmapped|mapper\._unmapped)"
    r"|cached_block_hashes_by_block.*|retention\.on_device|conversations\.prewarms\.pending"
    r"|superseded\._states|events\._(descriptions|published\[\d\]))"
)
"""What is known of blocks that are cached: a reset empties it."""
MEASURED = re.compile(
    r"pool\.(_stats\b.*|costs\b.*|conversations\._turns\b.*|host\._held_by"
    r"|retention\.hinted\b.*|secondary\._jobs\.evicted_bytes"
    r"|secondary\.tiers\[\d\]\.(stats\b.*|_fetched_s)"
    r"|admission\b.*|elastic\.(unmapped|mapper\._unmapped)"
    r"|host\._policy\._ends\._(young|old))"
)
"""What was measured, and what is remembered of so many names or keys at most: a reset
leaves it."""

_LAYOUT = LAYOUTS[0]
# Computing takes longer than to read from below.
_SLOW = replace(TUNING, assumed_prefill_s=100.0)
SETUPS = {
    "device is small": Setup(_LAYOUT, 0, 30, load_time=1),
    "loads ahead": Setup(_LAYOUT, 6, 80, load_time=3, is_async=True),
    "below": Setup(_LAYOUT, 2, 8, below=(1, 3), is_async=True, tuning=_SLOW),
    "two ranks below": Setup(_LAYOUT, 2, 8, below=(2, 2, 2), load_time=1, tuning=_SLOW),
    "elastic": Setup(
        _LAYOUT, 30, 30, load_time=2, elastic=Elastic(1, 2, 5, 0.0, False, 0.0)
    ),
    "elastic and below": Setup(
        _LAYOUT,
        8,
        10,
        below=(3, 3),
        load_time=1,
        elastic=Elastic(1, 3, 0, 0.2, True, 0.5),
        tuning=_SLOW,
    ),
    "events and below": Setup(
        _LAYOUT,
        2,
        8,
        below=(1, 3),
        load_time=1,
        kv_events=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        tuning=_SLOW,
    ),
    "below in parts": Setup(
        _LAYOUT,
        2,
        8,
        below=(1, 3),
        load_time=1,
        tuning=replace(_SLOW, max_looks=2, looks_per_ask=1),
    ),
    "hybrid": Setup(LAYOUTS[-1], 4, 10, below=(1, 2), load_time=1, tuning=_SLOW),
}
HINTS = (
    None,
    {"conversation": "a", "release": True},
    {"prewarm": True, "max_load_tokens": 8},
    {"retain": [{"priority": 90, "ttl": 3}], "max_offload_tokens": 4},
)
NUM_STEPS = 14


def begun(setup: Setup) -> Engine:
    """An engine that has served some documents, which it finds on all tiers."""
    engine = Engine(setup)
    others = [[(s * i) % 13 + 1 for i in range(24)] for s in (2, 3, 4, 6)]
    for document in (*DOCUMENTS, *others):
        engine.add(document.copy(), 2)
        engine.settle(100, rounds=1)
    engine.finished.clear()
    return engine


def ask(engine: Engine) -> None:
    """Requests that find and lack something on each tier."""
    for i, hints in enumerate(HINTS):
        engine.add([*DOCUMENTS[i % 3], *range(i)], 4, hints=hints)


def states(engine: Engine) -> set[str]:
    """In which of its states each request is."""
    pool = engine._pool
    found = set()
    for each in engine._live.values():
        request = each.request
        found.add(request.status.name)
        if pool.secondary is not None:
            wait = pool.secondary.reader._waits.get(request)
            if wait is not None and not wait.is_asked:
                found.add("looked up in part")
            elif wait is not None:
                if wait.inquiries:
                    found.add("asked")
                elif wait.found:
                    found.add("answered")
                if any(each.left for each in wait.inquiries):
                    found.add("answered in part")
                if wait.fetches:
                    found.add("fetching")
        if pool.load_admission.is_loading(request):
            found.add("loading ahead")
    if pool.prefetches.unclaimed:
        found.add("loaded ahead")
    return found


def left(engine: Engine, but: re.Pattern[str], new: dict[str, int]) -> dict[str, int]:
    """Tables that have more than in a new engine."""
    # As a thread of metrics does, and the next step.
    engine._pool.take_stats()
    engine._pool.take_events()
    return {
        path: size
        for path, size in sizes(engine._pool).items()
        if size > new.get(path, 0) and not but.fullmatch(path)
    }


def abort_all(engine: Engine) -> None:
    while engine._live:
        engine.abort(0)


def reset(engine: Engine) -> None:
    engine.reset(running=True)
    abort_all(engine)


def check(engine: Engine, new: dict[str, int]) -> None:
    requests = [ref(each.request) for each in engine.finished]
    engine.settle()
    engine.finished.clear()
    gc.collect()
    # The next steps let go of what they had found.
    engine.settle(0)
    assert not any(request() for request in requests), "a request is kept"
    assert not left(engine, CACHED_OR_MEASURED, new)
    pool = engine._pool
    if isinstance(pool, ElasticBlockPool) and not pool.elastic.mapper.num_wanted():
        assert not pool.elastic.is_busy
        has_null = pool.null_block.block_id // pool.elastic.mapper.blocks_per_page
        gone = {*range(pool.elastic.num_pages)} - {has_null}
        assert pool.elastic.unmapped == gone, "an idle engine keeps memory"
    assert engine.reset(running=False)
    assert not left(engine, MEASURED, new)


CACHED_OR_MEASURED = re.compile(f"{CACHED.pattern}|{MEASURED.pattern}")


@pytest.mark.parametrize("end", [abort_all, reset])
@pytest.mark.parametrize("name", SETUPS)
def test_nothing_is_left(name: str, end: Callable[[Engine], None]) -> None:
    setup = SETUPS[name]
    engine = Engine(setup)
    new = sizes(engine._pool)
    for num_steps in range(NUM_STEPS):
        engine = begun(setup)
        ask(engine)
        for _ in range(num_steps):
            engine.step()
        end(engine)
        check(engine, new)


@pytest.mark.parametrize("num_steps", range(0, NUM_STEPS, 3))
def test_nothing_is_left_once_a_connector_has_sent(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of requests that have ended stay in use until then."""
    held: list[str] = []

    def delays(self: Remote, request: Request, block_ids: object) -> Any:
        held.append(request.request_id)
        return True, None

    setup = replace(SETUPS["below"], remote=1)
    new = sizes(Engine(setup)._pool)
    engine = begun(setup)
    monkeypatch.setattr(Remote, "request_finished_all_groups", delays)
    ask(engine)
    for _ in range(num_steps):
        engine.step()
    abort_all(engine)
    for _ in range(3):
        engine.step()
    assert held or not num_steps
    monkeypatch.undo()
    sent = KVConnectorOutput(finished_sending=set(held) & {*engine._scheduler.requests})
    engine._scheduler._update_from_kv_xfer_finished(sent)
    check(engine, new)


@pytest.mark.skipif(not upstream.STREAMS, reason="requests end with their input")
@pytest.mark.parametrize("name", ["below", "loads ahead"])
def test_nothing_is_left_of_sessions_that_wait_for_input(name: str) -> None:
    """They hold their blocks, so that upstream refuses to reset before they end."""
    setup = SETUPS[name]
    new = sizes(Engine(setup)._pool)
    engine = begun(setup)
    for i, hints in enumerate(HINTS):
        session = engine.add([*DOCUMENTS[i % 3], *range(i)], 2, hints=hints)
        session.resumable, session.streaming_queue = True, deque()
        del session
    states_seen = set()
    for _ in range(60):
        engine.step()
        states_seen |= {each.request.status.name for each in engine._live.values()}
    assert "WAITING_FOR_STREAMING_REQ" in states_seen
    abort_all(engine)
    check(engine, new)


def test_every_state_is_one_in_which_requests_are_aborted() -> None:
    seen: set[str] = set()
    for setup in SETUPS.values():
        engine = begun(setup)
        ask(engine)
        for _ in range(NUM_STEPS):
            engine.step()
            seen |= states(engine)
    assert seen >= {
        "WAITING",
        "RUNNING",
        "PREEMPTED",
        "looked up in part",
        "asked",
        "answered in part",
        "answered",
        "fetching",
        "loading ahead",
        "loaded ahead",
    }


@pytest.mark.parametrize("name", SETUPS)
def test_what_is_left_in_a_table_is_found(name: str) -> None:
    engine = begun(SETUPS[name])
    new = sizes(Engine(SETUPS[name])._pool)
    engine.settle()
    engine.finished.clear()
    assert not left(engine, CACHED_OR_MEASURED, new)

    class Leak:
        pass

    item = Leak()
    for path, table in tables(engine._pool).items():
        is_excepted = CACHED_OR_MEASURED.fullmatch(path)
        if is_excepted or path.startswith("pool.blocks"):
            continue
        before = len(table)
        put_in(table, item)
        assert len(table) == before + 1
        found = {
            p: size
            for p, size in sizes(engine._pool).items()
            if size > new.get(p, 0) and not CACHED_OR_MEASURED.fullmatch(p)
        }
        assert path in found, f"nothing is said of {path}"
        take_out(table, item)


def take_out(table: Any, item: Any) -> None:
    """What `put_in` has left."""
    if hasattr(table, "values"):
        del table[item]
    else:
        table.remove(item)
