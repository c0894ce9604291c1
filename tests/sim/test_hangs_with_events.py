# SPDX-License-Identifier: Apache-2.0
"""Copies that never end, on an engine that publishes KV cache events.

Until the tier is off and after, a subscriber knows what both tiers hold. See
`test_hangs` for what else must hold, and `test_events` for engines without faults.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.follower import Follower, Mismatch
from vllm.distributed.kv_events import BlockRemoved

from .fake_cuda import FakeCuda
from .scheduler import Setup
from .scripts import random_script
from .stream_play import collect_fast as collect_fast
from .stream_play import end_threads
from .stream_worker import Hang, Luck, StreamEngine
from .test_events import FOLLOWED, FollowedEngine
from .test_hangs import BUSY, IMPATIENT

MIN_SCRIPTS, MAX_SCRIPTS = 3, 40


def _engine(setup: Setup, cuda: FakeCuda, seed: int) -> Any:
    """An engine whose events a subscriber compares with the pool."""

    class Streams(StreamEngine):
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup, cuda, Luck(False, False), seed, IMPATIENT)

    class Followed(FollowedEngine, Streams):
        pass

    return Followed(setup)


def _play(
    kind: str, seed: int, patch: pytest.MonkeyPatch
) -> tuple[bool, Counter[str], int]:
    """A script whose copies of `kind` hang. Returns whether the tier is off for that,
    the events by kind, and how many device blocks were given up."""
    rng, cuda = Random(seed), FakeCuda("random", seed)
    with patch.context() as inner:
        cuda.install(inner)
        script = random_script(rng)
        layout = script.setup.layout
        if layout not in FOLLOWED:
            layout = rng.choice(FOLLOWED)
        setup = replace(script.setup, **BUSY, layout=layout)
        engine = _engine(setup, cuda, seed)
        hang = Hang(kind, skip=rng.randrange(3))
        engine._worker.hang = hang
        error: BaseException | None = None
        try:
            for action in (*script.actions, *script.actions):
                action.run(engine)
                if engine._worker.is_off and rng.random() < 0.2:
                    hang.release()
            hang.release()
            engine.drain()
            engine.follower.follow(engine.pool.take_events())
            assert not engine.follower.blocks
        except Exception as found:
            # Tracebacks hold the streams.
            error = found.with_traceback(None)
        finally:
            hang.release()
            is_off = engine._worker.is_off
            engine._worker = None  # type: ignore[assignment]
            end_threads(cuda)
            engine.close()
    if error is not None:
        raise error
    pool = engine.pool
    return is_off, engine.follower.num_events, len(pool.blocks) - pool.num_gpu_blocks


@pytest.mark.parametrize("kind", ["store", "clean", "load_ahead"])
def test_events_tell_of_the_tier_that_is_off(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_off = num_lost = 0
    told: Counter[str] = Counter()
    for seed in range(MAX_SCRIPTS):
        # Some scripts have no copy that could hang, or none with blocks to lose.
        if num_off >= MIN_SCRIPTS and (num_lost or kind != "load_ahead"):
            break
        is_off, events, lost = _play(kind, seed, monkeypatch)
        num_off += is_off
        num_lost += lost
        told += events if is_off else {}
    assert num_off >= MIN_SCRIPTS
    assert num_lost or kind != "load_ahead"
    assert told["BlockStored CPU"] and told["BlockRemoved CPU"]


def test_removals_that_are_not_told_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control."""
    follow = Follower.follow

    def all_but_the_hosts(follower: Follower, events: Iterable[Any]) -> None:
        follow(follower, [e for e in events if not _is_removed_from_host(e)])

    monkeypatch.setattr(Follower, "follow", all_but_the_hosts)
    with pytest.raises(Mismatch):
        for seed in range(MAX_SCRIPTS):
            _play("clean", seed, monkeypatch)


def _is_removed_from_host(event: Any) -> bool:
    return isinstance(event, BlockRemoved) and event.medium == "CPU"
