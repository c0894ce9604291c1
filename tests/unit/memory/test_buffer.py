# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank: whole slots in every piece, nothing left behind."""

import ctypes
import gc
import logging
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.memory.test_pages import num_resident, resident
from vllm.v1.kv_tier.memory import buffer as host_buffer
from vllm.v1.kv_tier.memory import buffer as pinned_memory
from vllm.v1.kv_tier.memory import numa
from vllm.v1.kv_tier.memory.buffer import HostBuffer

MiB = 1 << 20
GPU = torch.device("cuda", 1)


class Driver:
    """Stands for the CUDA runtime: this machine has none."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.devices: dict[str, torch.device] = {}
        self.cpus: list[set[int]] = []
        self.allocated: dict[int, mmap.mmap] = {}
        self.refuses_to_allocate = True
        self.on_register: Callable[[int], int] = lambda size: 0
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def set_device(self, device: torch.device) -> None:
        self.devices[threading.current_thread().name] = device

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert self.devices[threading.current_thread().name] == GPU and flags == 0
        self.cpus.append(os.sched_getaffinity(0))
        error = self.on_register(size)
        if error == 0:
            with self._lock:
                for other, length in self.registered.items():
                    assert pointer + size <= other or other + length <= pointer
                self.registered[pointer] = size
        return error

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0

    # The part of the driver itself that is called by pointers.

    def cuCtxGetCurrent(self, context: Any) -> int:
        assert self.devices[threading.current_thread().name] == GPU
        context._obj.value = 7
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        assert context.value == 7
        return 0

    def cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> int:
        assert flags.value == 0
        self.cpus.append(os.sched_getaffinity(0))
        if self.refuses_to_allocate:
            return 801
        memory = mmap.mmap(-1, size.value)
        address._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.allocated[address._obj.value] = memory
        return 0

    def cuMemFreeHost(self, address: ctypes.c_void_p) -> int:
        del self.allocated[address.value or 0]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "set_device", driver.set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    monkeypatch.setattr(host_buffer, "gpu_node", lambda device: None)
    monkeypatch.setattr(pinned_memory, "_driver", lambda: driver)
    return driver


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for level in ("info", "warning"):

        def write(text: str, *args: Any, level: str = level) -> None:
            lines.append(f"{level}: {text % args}")

        monkeypatch.setattr(logging.getLogger(host_buffer.__name__), level, write)
    return lines


def pinned(num_slots: int = 40, **settings: Any) -> HostBuffer:
    settings = {"piece_bytes": 4 * MiB, "threads": 3} | settings
    return HostBuffer(num_slots, MiB, pin=True, device=GPU, **settings)


def test_memory_is_there_exact_zero_and_given_back(log: list[str]) -> None:
    # What other tests have left would be given back in between.
    gc.collect()
    before = resident()
    buffer = HostBuffer(130, MiB, pin=False, piece_bytes=16 * MiB)
    assert num_resident(buffer.slots) == 130 * MiB
    # The process has more than its slots: threads that tests before this one left, or
    # that this one starts. A second copy of a piece would be 16 MiB.
    assert resident() - before < 138 * MiB
    assert buffer.slots.shape == (130, MiB) and buffer.slots.is_contiguous()
    assert buffer.slots.untyped_storage().nbytes() == 130 * MiB
    assert not buffer.pinned and not buffer.slots.any()
    assert len(log) == 1 and "130 host slots of 1048576 bytes" in log[0]
    del buffer
    gc.collect()
    # The first sum of a process starts threads.
    assert resident() - before < 8 * MiB


def test_memory_that_cannot_be_had_is_an_error_with_the_flag() -> None:
    with pytest.raises(MemoryError, match="--kv-offloading-size.*Lower the size"):
        HostBuffer(num_slots=1 << 30, slot_bytes=1 << 30, pin=False)


def test_every_piece_is_registered_after_its_pages_are_there(driver: Driver) -> None:
    gc.collect()
    before = resident()

    def after_touch(size: int) -> int:
        done = sum(driver.registered.values())
        # A piece has four; what other tests have left may be given back meanwhile.
        assert resident() - before > done + size - 3 * MiB
        return 0

    driver.on_register = after_touch
    buffer = pinned(num_slots=42)
    assert buffer.pinned
    start = buffer.slots.data_ptr()
    assert driver.registered == {
        start + i * MiB: min(4, 42 - i) * MiB for i in range(0, 42, 4)
    }


def test_memory_is_unregistered_before_it_goes(driver: Driver) -> None:
    buffer = pinned()
    slots = buffer.slots
    del buffer
    gc.collect()
    assert not driver.registered
    assert not slots.any()


def test_one_piece_is_registered_while_the_next_are_touched(driver: Driver) -> None:
    first = threading.Event()

    def wait_for_the_next(size: int) -> int:
        if not first.is_set():
            first.set()
            deadline = time.monotonic() + 30
            while len(driver.registered) < 9:
                assert time.monotonic() < deadline, "the others wait"
                time.sleep(0.001)
        return 0

    driver.on_register = wait_for_the_next
    buffer = pinned(threads=2)
    assert buffer.pinned and len(driver.registered) == 10


@pytest.mark.compat("faults", "memory that cannot be pinned", "used unpinned")
def test_memory_the_driver_refuses_is_used_unpinned(
    driver: Driver, log: list[str]
) -> None:
    driver.on_register = lambda size: 2 if len(driver.registered) == 3 else 0
    buffer = pinned(threads=1)
    assert not buffer.pinned and not driver.registered
    assert num_resident(buffer.slots) == 40 * MiB
    assert log[0].startswith("warning") and "ulimit -l unlimited" in log[0]
    assert f"(error 2, at {12 * MiB} of {40 * MiB} bytes)" in log[0]
    assert "cuMemHostAlloc failed with error 801" in log[0]
    assert len(driver.cpus) == 4 + 1, "it was asked again"
    assert "not pinned" in log[1] and len(log) == 2


def test_memory_the_driver_does_not_register_it_allocates(
    driver: Driver, log: list[str]
) -> None:
    """As in guests of confidential computing."""
    driver.refuses_to_allocate = False
    before: list[int] = []

    def refuse(size: int) -> int:
        before.append(resident())
        return 801

    driver.on_register = refuse
    empty = resident()
    buffer = pinned(num_slots=41)
    assert buffer.pinned and not driver.registered
    ((address, memory),) = driver.allocated.items()
    assert buffer.slots.data_ptr() == address and len(memory) == 41 * MiB
    assert buffer.slots.shape == (41, MiB)
    # What was refused is gone.
    assert max(before) > empty + 3 * MiB
    assert resident() - empty < 3 * MiB
    (line, other) = log
    assert line.startswith("info") and "confidential computing" in line
    assert "(error 801, at " in line
    assert "pinned" in other and "not pinned" not in other
    # As long as somebody sees it.
    slots = buffer.slots
    del buffer
    gc.collect()
    assert driver.allocated
    slots.fill_(1)
    del slots, memory
    gc.collect()
    assert not driver.allocated


def test_a_machine_without_the_driver_goes_on_unpinned(
    driver: Driver, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(pinned_memory, "_driver", missing)
    driver.on_register = lambda size: 1
    assert not pinned().pinned
    assert "libcuda.so.1" in log[0]


@pytest.mark.compat("faults", "host memory that ends half-way at start")
def test_nothing_is_left_when_memory_ends_half_way(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_buffer.touch
    touched = []

    def touch(address: int, num_bytes: int) -> None:
        touched.append(address)
        if len(touched) == 7:
            raise OSError(12, "Cannot allocate memory")
        real(address, num_bytes)

    def slow(size: int) -> int:
        time.sleep(0.05)
        return 0

    monkeypatch.setattr(host_buffer, "touch", touch)
    driver.on_register = slow
    before = resident()
    with pytest.raises(MemoryError, match="Lower the size") as raised:
        pinned(num_slots=400, threads=2)
    # Not when the error is forgotten, and not while a thread still registers.
    assert not driver.registered
    time.sleep(0.1)
    assert not driver.registered
    assert len(touched) < 100
    del raised
    gc.collect()
    assert resident() - before < 8 * MiB


def test_an_error_of_the_driver_leaves_nothing_registered(driver: Driver) -> None:
    def fail(size: int) -> int:
        if len(driver.registered) == 2:
            raise RuntimeError("no driver")
        return 0

    driver.on_register = fail
    with pytest.raises(RuntimeError, match="no driver"):
        pinned(threads=1)
    assert not driver.registered


def test_progress_is_logged_now_and_then(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(address: int, num_bytes: int) -> None:
        time.sleep(0.02)

    monkeypatch.setattr(host_buffer, "touch", slow)
    piece: dict[str, Any] = {"pin": False, "piece_bytes": 256 * MiB, "threads": 1}
    begun = time.perf_counter()
    HostBuffer(40, 256 * MiB, **piece, progress_s=0.1)
    # 0.8 s, more on a busy machine.
    progress = log[:-1]
    assert 1 <= len(progress) <= (time.perf_counter() - begun) / 0.1
    for line in progress:
        assert re.fullmatch(
            r"info: KV tier: \d+\.\d of 10\.0 GiB of host memory ready\.", line
        )
    log.clear()
    HostBuffer(40, 256 * MiB, **piece, progress_s=60)
    assert len(log) == 1


def test_memory_is_touched_from_the_node_of_the_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = max(os.sched_getaffinity(0))
    placed = []
    monkeypatch.setattr(host_buffer, "gpu_node", {GPU: 5}.get)
    monkeypatch.setattr(host_buffer, "usable_cpus", {5: {cpu}}.get)
    monkeypatch.setattr(host_buffer, "prefer_node", lambda *args: placed.append(args))
    buffer = pinned()
    assert placed == [(buffer.slots.data_ptr(), 40 * MiB, 5)]
    assert driver.cpus == [{cpu}] * 10
    # The thread that called is where it was.
    assert os.sched_getaffinity(0) == numa.usable_cpus(None)


def test_a_node_out_of_reach_is_said_and_not_fatal(
    driver: Driver, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = os.sched_getaffinity(0)
    monkeypatch.setattr(host_buffer, "gpu_node", {GPU: 5}.get)
    monkeypatch.setattr(
        host_buffer, "usable_cpus", lambda node: set() if node == 5 else everywhere
    )
    monkeypatch.setattr(host_buffer, "prefer_node", lambda *args: False)
    assert pinned().pinned
    assert driver.cpus == [everywhere] * 10
    assert "NUMA node 5" in log[0] and "CAP_SYS_NICE" in log[0]


@pytest.mark.parametrize("cpus, gpus, expected", [(96, 1, 16), (24, 2, 12), (1, 8, 1)])
def test_ranks_share_the_cpus(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    gpus: int,
    expected: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pinned()._share_of(set(range(cpus))) == expected


def test_the_current_gpu_is_the_default(driver: Driver) -> None:
    assert HostBuffer(4, MiB, pin=True).pinned
    assert HostBuffer(4, MiB, pin=True, device=torch.device("cuda")).pinned
    assert set(driver.devices.values()) == {GPU}


@pytest.mark.compat("faults", "out of host memory under load", "taken at start")
def test_slots_need_no_memory_after_start() -> None:
    """What others take later cannot be missing: every page is there."""
    code = (
        "import resource, torch\n"
        "from vllm.v1.kv_tier.memory.buffer import HostBuffer\n"
        "slots = HostBuffer(64, 1 << 20, pin=False, huge_pages=False).slots\n"
        "block = torch.full((1 << 20,), 3, dtype=torch.uint8)\n"
        "slots[0].copy_(block)\n"
        "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        # No page more may be had from now on.
        "size = 1024 * int(open('/proc/self/status').read()"
        ".split('VmData:')[1].split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (size, size))\n"
        "before = usage()\n"
        "for slot in slots: slot.copy_(block)\n"
        "print(usage() - before, sum(torch.equal(s, block) for s in slots))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    faults, written = map(int, found.stdout.split()[-2:])
    assert written == 64
    # 16,384 pages were written.
    assert faults < 200
