# SPDX-License-Identifier: Apache-2.0
"""An engine whose KV cache is mapped and unmapped as that of a GPU is, in memory of
this process: to touch what is not mapped ends it with a segmentation fault.

Usage: python -m tests.e2e.mapped_pages MODEL; prints a line of JSON in the end.
"""

import ctypes
import json
import mmap
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm.v1.kv_tier.elastic import device_memory
from vllm.v1.kv_tier.memory.pages import anonymous, discard

from .engine import Engine
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, COMMON, device, tier
from .workloads import text

NUM_BLOCKS, NUM_PROMPTS, PROMPT_BLOCKS = 256, 16, 14
AT_FIRST = 200
"""Blocks that memory is there for when the engine starts; later, for all."""
PAGE_BYTES = 64 << 10

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedMemory:
    """In place of `KvcachedMemory`."""

    page_bytes = PAGE_BYTES
    made: "MappedMemory"

    def __init__(self, num_bytes: int, num_layers: int, device: torch.device) -> None:
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self.memory = anonymous(whole, huge_pages=False).view(torch.int8)
        self._protect(0, whole, 0)
        self.mapped: set[int] = set()
        self.room = AT_FIRST * BLOCK_BYTES
        MappedMemory.made = self

    def map(self, pages: Sequence[int]) -> bool:
        assert not {*pages} & self.mapped, "mapped twice"
        if (len(self.mapped) + len(pages)) * PAGE_BYTES > self.room:
            return False
        for page in pages:
            self._protect(page, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
        self.mapped |= {*pages}
        return True

    def unmap(self, pages: Sequence[int]) -> None:
        assert {*pages} <= self.mapped, "unmapped twice"
        for page in pages:
            self._protect(page, PAGE_BYTES, 0)
            discard(self.memory.data_ptr() + page * PAGE_BYTES, PAGE_BYTES)
        self.mapped -= {*pages}

    def free_bytes(self) -> tuple[int, int]:
        return self.room - len(self.mapped) * PAGE_BYTES, self.room

    def _protect(self, page: int, num_bytes: int, protection: int) -> None:
        address = self.memory.data_ptr() + page * PAGE_BYTES
        if _mprotect(address, num_bytes, protection):
            raise OSError(ctypes.get_errno(), "mprotect")


def main(model: str) -> dict[str, Any]:
    device_memory.KvcachedMemory = MappedMemory  # type: ignore[misc, assignment]
    device_memory._on_gpu = lambda wrapper: True
    engine = Engine(
        model=model,
        **COMMON,
        **device(NUM_BLOCKS),
        **tier(NUM_BLOCKS, shrink_after_s=0.2),
        distributed_executor_backend="uni",
    )
    memory, elastic = MappedMemory.made, engine.pool.elastic
    found: dict[str, Any] = {"missing": len(elastic.unmapped)}
    memory.room = 2 * NUM_BLOCKS * BLOCK_BYTES
    prompts = [text(i, PROMPT_BLOCKS * BLOCK_TOKENS + 1) for i in range(NUM_PROMPTS)]
    found["pages"] = elastic.num_pages
    found["page_bytes"] = elastic._layout.page_bytes
    found["prompt_tokens"] = NUM_PROMPTS * PROMPT_BLOCKS * BLOCK_TOKENS
    found["rounds"] = []
    for _ in range(3):
        before = engine.counters()
        answers = engine.generate(prompts, max_tokens=4)
        after = engine.counters()
        hits = "kv_tier_host_hit_tokens"
        while engine.core.scheduler.has_requests():
            engine.core.step_fn()
        deadline = time.monotonic() + 60
        while elastic.mapper._held and time.monotonic() < deadline:
            # The thread unmaps.
            time.sleep(0.01)
        found["rounds"].append(
            {
                "tokens": [answer["tokens"] for answer in answers],
                "host_hit_tokens": after[hits] - before[hits],
                "preempted": after["num_preemptions"] - before["num_preemptions"],
                "unmapped": len(elastic.unmapped),
                "mapped_bytes": len(memory.mapped) * PAGE_BYTES,
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
