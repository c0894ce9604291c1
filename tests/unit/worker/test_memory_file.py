# SPDX-License-Identifier: Apache-2.0
"""A rank's host memory, where processes of its stores map it."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.memory.shared import NotShared, SharedMemory
from vllm.v1.kv_tier.plan import SecondaryJob, StepPlan
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker import host_tier
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SecondaryIO
from vllm.v1.kv_tier.worker.slots import RankSlots

from ..stores.objects import KEYS, NAMESPACE, ROW_BYTES
from ..stores.servers import until
from ..stores.test_file_processes import children
from ..stores.test_file_processes import none_is_left as none_is_left
from ..stores.test_file_processes import root as root


class Rank:
    """With slots that processes map, and a store of which it is noted what it does."""

    def __init__(self, root: Path, **tuning: float) -> None:
        config = FsConfig(root_dir=str(root), max_gib=1)
        config.check()
        memory = SharedMemory.create(2, ROW_BYTES, 1)
        self.store = config.open(NAMESPACE, 0, ROW_BYTES)
        self.quiet = memory.board[0]
        slots = RankSlots(2)
        slots.mark_stored([0, 1])
        self.io = SecondaryIO(
            [self.store],
            memory.bytes.view(2, ROW_BYTES),
            slots,
            StepReportBuilder(),
            RankTuning(**tuning),  # type: ignore[arg-type]
            memory,
        )

    def begin(self, is_put: bool) -> None:
        job = SecondaryJob(1, is_put, [KEYS[0]], [0], 0, 0, 0)
        plan = StepPlan(1, secondary=[job])
        self.io.begin_step(plan, lambda stores, loads: True)

    def quiet_s(self, place: int) -> float:
        """For how long objects are not begun to be written."""
        return (self.quiet[place] - time.monotonic_ns()) / 1e9


def test_they_are_quiet_while_a_step_is_launched(root: Path) -> None:
    rank = Rank(root, put_gate_s=20)
    assert rank.quiet_s(0) < 0
    rank.io.set_launching(True)
    assert 10 < rank.quiet_s(0) <= 20
    rank.io.set_launching(False)
    assert rank.quiet_s(0) < 0


def test_they_are_quiet_while_something_is_read_and_a_moment_longer(root: Path) -> None:
    rank = Rank(root, max_put_delay_s=40, after_read_s=2)
    goes_on, get = threading.Event(), rank.store.get

    def late(*batch: Any) -> list[bool]:
        goes_on.wait(30)
        return get(*batch)

    rank.store.get = late  # type: ignore[method-assign]
    assert rank.quiet_s(1) < 0
    rank.begin(is_put=False)
    assert 20 < rank.quiet_s(1) <= 40
    slot = memoryview(rank.io._memory[1])
    writer = threading.Thread(target=rank.store.put, args=([KEYS[1]], [slot]))
    writer.start()
    time.sleep(0.2)
    assert rank.store.exists([KEYS[1]]) == [False]
    goes_on.set()
    until(lambda: rank.quiet_s(1) <= 2)
    assert rank.quiet_s(1) > 0.5
    writer.join(20)
    assert rank.store.exists([KEYS[1]]) == [True]
    # A read may follow what is asked.
    plan = StepPlan(2, asks_secondary=True)
    rank.io.begin_step(plan, lambda stores, loads: True)
    assert 0.5 < rank.quiet_s(1) <= 2


def test_nobody_takes_short_turns_while_they_move_something(root: Path) -> None:
    rank = Rank(root)
    assert rank.store.is_apart
    turns_s, put = [], rank.store.put

    def noted(*batch: Any) -> list[bool]:
        turns_s.append(sys.getswitchinterval())
        return put(*batch)

    rank.store.put = noted  # type: ignore[method-assign]
    rank.begin(is_put=True)
    until(lambda: rank.store.exists(KEYS[:1]) == [True])
    assert turns_s == [sys.getswitchinterval()]


@pytest.mark.parametrize("can_share", [True, False])
def test_a_rank_whose_memory_cannot_be_shared_has_none(
    can_share: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    if not can_share:
        monkeypatch.setattr(os, "memfd_create", refuse)
    regions = build_regions([torch.zeros(4, 500)], 4)
    tier = HostTier.allocate(regions, 3, torch.device("cpu"), as_file=True)
    config = FsConfig(root_dir=str(root), max_gib=1)
    config.check()
    store = config.open(NAMESPACE, 0, tier.buffer.slots.shape[1])
    tier.open_secondary([store])
    assert store.is_apart == can_share and len(children()) == 2 * can_share
    for i in range(3):
        tier.buffer.slots[i] = i + 1
    rows = [memoryview(each.numpy()) for each in tier.buffer.slots]
    assert store.put(KEYS[:2], rows[:2]) == [True, True]
    assert store.get(KEYS[:1], rows[2:]) == [True]
    assert tier.buffer.slots[:, 0].tolist() == [1, 2, 1]
    # No file keeps the memory, which goes with the tier.
    assert tier._memory_file is None or tier._memory_file.fd < 0


def resident_bytes(kind: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(kind)
    )
    return int(line.split()[1]) << 10


def test_shared_memory_that_is_refused_is_gone_before_other_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver may refuse to register it late, when all of it was touched."""
    num_bytes, at_private = 1 << 20, []
    shared, private = host_tier.shared_buffer, host_tier.HostBuffer
    before = resident_bytes("RssShmem")

    def refuse(memory: SharedMemory, *args: Any) -> None:
        shared(memory, *args)
        # The kernel counts by CPU and reports a sum that lags by some pages.
        assert resident_bytes("RssShmem") >= before + 63 * num_bytes
        memory.close()
        raise NotShared("planned")

    def take(*args: Any, **kwargs: Any) -> Any:
        at_private.append(resident_bytes("RssShmem"))
        return private(*args, **kwargs)

    monkeypatch.setattr(host_tier, "shared_buffer", refuse)
    monkeypatch.setattr(host_tier, "HostBuffer", take)
    regions = build_regions([torch.zeros(4, num_bytes // 4)], 4)
    HostTier.allocate(regions, 64, torch.device("cpu"), as_file=True)
    assert at_private and at_private[0] <= before + num_bytes
