# SPDX-License-Identifier: Apache-2.0
"""A KV connector that takes its time, as those for prefill and decode on two engines.

It keeps the KV of ended requests in files, so that one engine can be both. Blocks
that it loads hold rubbish until a few steps later, and those that it sends are kept
as long.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.kv_tier.memory.regions import Region, build_regions

BLOCK = 32
NUM_STEPS = 4
"""How long a transfer takes."""

CHANGED: list[str] = []
"""Blocks that changed while they were sent."""


@dataclass
class Transfer:
    req_id: str
    hashes: list[bytes]
    """Of all blocks of the prompt up to the last that is transferred."""
    blocks: list[int]
    """The last of them, which are transferred."""
    steps_left: int = NUM_STEPS
    before: list[list[torch.Tensor]] = field(default_factory=list)

    def parts(self) -> list[tuple[int, bytes]]:
        """Each block, and the hash of the prefix that ends with it."""
        last = self.hashes[len(self.hashes) - len(self.blocks) :]
        return list(zip(self.blocks, last, strict=True))


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)


class SlowConnector(KVConnectorBase_V1):
    """Loads asynchronously what the engine does not have, and sends all it has."""

    fail_loads = 0
    """So many of the next loads fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transfer = self._kv_transfer_config
        self._folder = Path(transfer.get_from_extra_config("storage", "/nowhere"))
        self._metadata = Metadata()
        self._matched: dict[str, int] = {}
        self._under_way = Metadata()
        self._regions: list[Region] = []
        self._invalid: set[int] = set()

    # ---------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        # Upstream's connectors ask this themselves, and so does the scheduler of newer
        # releases: whoever wants logprobs of a prompt needs all of it computed.
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        end = 0
        for block_hash in request.block_hashes:
            if end + BLOCK >= request.num_tokens or not self._file(block_hash).exists():
                break
            end += BLOCK
        self._matched[request.request_id] = end
        found = max(end - num_computed_tokens, 0)
        return found, found > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            end = self._matched.pop(request.request_id)
            (ids,) = blocks.get_block_ids()
            first = (end - num_external_tokens) // BLOCK
            self._metadata.loads.append(
                Transfer(
                    request.request_id,
                    list(request.block_hashes[: end // BLOCK]),
                    ids[first : end // BLOCK],
                )
            )

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        metadata, self._metadata = self._metadata, Metadata()
        return metadata

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        num_blocks = min(request.num_computed_tokens, request.num_tokens - 1) // BLOCK
        if not num_blocks:
            return False, None
        hashes = list(request.block_hashes[:num_blocks])
        transfer = Transfer(request.request_id, hashes, list(block_ids[:num_blocks]))
        self._metadata.sends.append(transfer)
        return True, None

    # ------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._kv_cache_config is not None
        num_blocks = self._kv_cache_config.num_blocks
        self._regions = build_regions(list(kv_caches.values()), num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for load in metadata.loads:
            for block in load.blocks:
                for region in self._regions:
                    region.blocks[block].view(torch.float32).fill_(7.0)
        for send in metadata.sends:
            send.before = [self._read(block) for block in send.blocks]
        self._under_way.loads += metadata.loads
        self._under_way.sends += metadata.sends

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent = self._advance("sends", self._end_send)
        received = self._advance("loads", self._end_load)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def _advance(self, kind: str, end: Callable[[Transfer], None]) -> set[str]:
        going, ended = [], set()
        for transfer in getattr(self._under_way, kind):
            transfer.steps_left -= 1
            if transfer.steps_left:
                going.append(transfer)
            else:
                end(transfer)
                ended.add(transfer.req_id)
        setattr(self._under_way, kind, going)
        return ended

    def _end_load(self, load: Transfer) -> None:
        parts = load.parts()
        if SlowConnector.fail_loads:
            SlowConnector.fail_loads -= 1
            self._invalid.update(load.blocks[1:])
            parts = parts[:1]
        for block, block_hash in parts:
            for region, data in zip(self._regions, torch.load(self._file(block_hash))):
                region.blocks[block].copy_(data)

    def _end_send(self, send: Transfer) -> None:
        for (block, block_hash), before in zip(send.parts(), send.before):
            now = self._read(block)
            if not all(torch.equal(a, b) for a, b in zip(now, before)):
                CHANGED.append(f"block {block} of request {send.req_id}")
            torch.save(now, self._file(block_hash))

    def _file(self, block_hash: bytes) -> Path:
        name = hashlib.sha256(repr(block_hash).encode()).hexdigest()
        return self._folder / f"{name}.pt"

    def _read(self, block: int) -> list[torch.Tensor]:
        return [region.blocks[block].clone() for region in self._regions]
