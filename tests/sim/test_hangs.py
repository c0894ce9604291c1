# SPDX-License-Identifier: Apache-2.0
"""Copies that never end, or long after the tier was switched off for them."""

import logging
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.pool import TieredBlockPool

from .content import Violation
from .fake_cuda import PACES, FakeCuda, Pace
from .scripts import random_script
from .stream_copies import SMALL_PARTS
from .stream_play import collect_fast as collect_fast
from .stream_play import end_threads
from .stream_worker import Hang, Luck, StreamEngine

BUSY = {"load_time": 1.0, "max_stall": 0.0, "is_async": True, "spare_blocks": 30}
MIN_SCRIPTS, MAX_SCRIPTS = 4, 40
IMPATIENT = replace(SMALL_PARTS, limit_s=0.1, grace_s=0.05, old_s=0.05)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    logger = logging.getLogger("vllm.v1.kv_tier.worker.host_tier")

    def error(text: str, *args: Any, exc_info: bool = False) -> None:
        if not exc_info:  # Else it is one of a copy that fails.
            found.append(text)

    monkeypatch.setattr(logger, "error", error)
    return found


def _play(
    pace: Pace, luck: Luck, kind: str, seed: int, patch: pytest.MonkeyPatch
) -> StreamEngine | None:
    """A script with a copy that hangs, and is released some steps later. None if the
    engine did without the copy until the end."""
    cuda = FakeCuda(pace, seed)
    rng = Random(seed)
    with patch.context() as inner:
        cuda.install(inner)
        script = random_script(rng)
        engine = StreamEngine(
            replace(script.setup, **BUSY), cuda, luck, seed, IMPATIENT
        )
        hang = Hang(kind, skip=rng.randrange(3))
        engine._worker.hang = hang
        error: BaseException | None = None
        try:
            # Once for the hang, and once more without the tier.
            for action in (*script.actions, *script.actions):
                action.run(engine)
                if engine._worker.is_off and rng.random() < 0.2:
                    hang.release()
            hang.release()
            engine.drain()
        except Exception as found:
            # Tracebacks hold the streams.
            error = found.with_traceback(None)
        hang.release()
        is_off = engine._worker.is_off
        engine._worker = None  # type: ignore[assignment]
        end_threads(cuda)
    if error is not None:
        raise error
    return engine if is_off else None


@pytest.mark.compat("faults", "a copy that never ends", "CUDA; simulated device")
@pytest.mark.parametrize("kind", ["store", "clean", "load_ahead"])
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_engine_lives(
    layerwise: bool,
    pace: Pace,
    kind: str,
    errors: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_hung = num_lost = 0
    for seed in range(MAX_SCRIPTS):
        # Some scripts have no copy that could hang, or none with blocks to lose.
        if seed >= MIN_SCRIPTS and num_hung and (num_lost or kind != "load_ahead"):
            break
        errors.clear()
        engine = _play(pace, Luck(layerwise, False), kind, seed, monkeypatch)
        if engine is None:
            continue
        num_hung += 1
        (error,) = errors
        assert "does not end" in error
        pool: Any = engine._scheduler.kv_cache_manager.block_pool
        assert pool.take_stats().slots_total == 0
        num_lost += len(pool.lost.withdrawn)
        assert pool.num_gpu_blocks == len(pool.blocks) - len(pool.lost.withdrawn)
    assert num_hung
    assert num_lost or kind != "load_ahead"


@pytest.mark.plants
def test_lost_blocks_in_use_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a load that ends late does harm."""
    monkeypatch.setattr(TieredBlockPool, "_withdraw_lost", lambda self: None)
    with pytest.raises(Violation):
        for seed in range(100):
            _play("random", Luck(False, False), "load_ahead", seed, monkeypatch)
