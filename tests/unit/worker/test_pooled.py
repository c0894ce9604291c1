# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool on a rank that has begun with it before it joined."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from vllm.v1.kv_tier.keeper.client import Member
from vllm.v1.kv_tier.keeper.server import Keeper
from vllm.v1.kv_tier.worker import pooled
from vllm.v1.kv_tier.worker.pooled import EarlyPool, join_pool

MiB = 1 << 20
SLOT_BYTES = 64 << 10
CPU = torch.device("cpu")


@contextmanager
def keeping(path: Path) -> Iterator[str]:
    keeper, is_over = Keeper(8 * MiB, 2, path), Event()

    def serve() -> None:
        while not is_over.is_set():
            keeper.serve_once(0.01)

    thread = Thread(target=serve)
    thread.start()
    yield str(path)
    is_over.set()
    thread.join()
    keeper.close()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU has no graphs that may be captured."""
    monkeypatch.setattr(pooled, "allow_during_capture", lambda: None)


def mappings() -> int:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("kv-tier-pool")


@pytest.mark.usefixtures("no_driver")
def test_early_memory_is_that_of_the_pool(tmp_path: Path) -> None:
    with keeping(tmp_path / "one") as path:
        early = EarlyPool(path, SLOT_BYTES, CPU)
        member = Member(path, b"1" * 32, SLOT_BYTES)
        neighbour = join_pool(member.place(), CPU)
        mine = join_pool(member.place(), CPU, early)
        neighbour.buffer.slots[3, 5] = 42
        assert mine.buffer.slots[3, 5] == 42
        gc.collect()
        # It is not mapped a second time.
        assert mappings() == 2


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("other", ["keeper", "size"])
def test_early_memory_of_another_pool_is_dropped(tmp_path: Path, other: str) -> None:
    with keeping(tmp_path / "one") as one, keeping(tmp_path / "two") as two:
        size = 2 * SLOT_BYTES if other == "size" else SLOT_BYTES
        early = EarlyPool(one, size, CPU)
        # As after a restart of the keeper, with the same path.
        path = two if other == "keeper" else one
        early._wanted = (path, size)
        member = Member(path, b"1" * 32, SLOT_BYTES)
        joined = join_pool(member.place(), CPU, early)
        assert joined.buffer.slots.shape[1] == SLOT_BYTES
        joined.buffer.slots[3, 5] = 42
        assert join_pool(member.place(), CPU).buffer.slots[3, 5] == 42


def test_rank_joins_where_nothing_could_be_done_early(tmp_path: Path) -> None:
    # Without a driver, nobody says that registering is allowed.
    with keeping(tmp_path / "one") as path:
        early = EarlyPool(path, SLOT_BYTES, CPU)
        member = Member(path, b"1" * 32, SLOT_BYTES)
        assert len(join_pool(member.place(), CPU, early).buffer.slots) == 128
