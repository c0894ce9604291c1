# SPDX-License-Identifier: Apache-2.0
"""A rank's host memory, where processes of its stores map it."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.plan import SecondaryJob, StepPlan
from vllm.v1.kv_tier.rank.report import ReportDraft
from vllm.v1.kv_tier.rank.secondary import SecondaryIO
from vllm.v1.kv_tier.rank.tuning import RankTuning
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.worker import HostTier

from .stores import KEYS, NAMESPACE, ROW_BYTES
from .test_file_processes import children, wait_for
from .test_file_processes import none_is_left as none_is_left
from .test_file_processes import root as root


def test_a_rank_tells_them_when_it_launches_a_step(root: Path) -> None:
    config = FsConfig(str(root), max_gib=1)
    config.check()
    memory = SharedMemory.create(2, ROW_BYTES, 1)
    slots, tuning = memory.bytes.view(2, ROW_BYTES), RankTuning(put_gate_s=30)
    store = config.open(NAMESPACE, 0, ROW_BYTES)
    io = SecondaryIO([store], slots, ReportDraft(), tuning, memory)
    assert store.is_apart
    # Nobody here needs Python's lock the more while they move something.
    turns_s, put = [], store.put

    def noted(*batch: Any) -> list[bool]:
        turns_s.append(sys.getswitchinterval())
        return put(*batch)

    store.put = noted  # type: ignore[method-assign]
    io.launches(True)
    assert memory.board[0, 0]
    io.launches(False)
    assert not memory.board[0, 0]
    job = SecondaryJob(1, True, [KEYS[0]], [0], 0, 0, 0)
    plan = StepPlan(1, secondary=[job])
    io.begin_step(plan, lambda stores, loads: True, lambda slot: True)
    wait_for(lambda: store.exists(KEYS[:1]) == [True])
    assert turns_s == [sys.getswitchinterval()]
    store.close()


@pytest.mark.parametrize("can_share", [True, False])
def test_a_rank_whose_memory_cannot_be_shared_has_none(
    can_share: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    if not can_share:
        monkeypatch.setattr(os, "memfd_create", refuse)
    num_files = psutil.Process().num_fds()
    regions = build_regions([torch.zeros(4, 500)], 4)
    tier = HostTier.allocate(regions, 3, torch.device("cpu"), as_file=True)
    config = FsConfig(str(root), max_gib=1)
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
    # Nothing keeps the memory, which goes with the tier.
    del tier, rows, store
    gc.collect()
    assert psutil.Process().num_fds() <= num_files
