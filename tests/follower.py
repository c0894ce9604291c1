# SPDX-License-Identifier: Apache-2.0
"""A follower of KV cache events, such as a KV-aware router has."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

Key = tuple[str, int, Any]
"""Medium, KV cache group, block hash."""


class Mismatch(AssertionError):
    """The events do not fit each other, or what they should tell."""


DESCRIPTION = ("extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""What events say of a block beside, in the releases where they do."""


def _group(event: Any) -> int:
    """Where events do not tell, there is only one."""
    return getattr(event, "group_idx", 0)


def _of_block(event: BlockStored, name: str, i: int) -> str:
    value = getattr(event, name, None)
    return repr(value[i] if isinstance(value, list) else value)


class Follower:
    """What both tiers hold, from their events alone."""

    def __init__(self) -> None:
        self.blocks: Counter[Key] = Counter()
        """How many blocks have each key."""
        self.num_events: Counter[str] = Counter()
        """By type and medium."""
        self._descriptions: dict[tuple[Any, ...], tuple] = {}

    def follow(self, events: Iterable[Any]) -> None:
        """Take events in.

        Raises:
            Mismatch: Something is removed that was never stored, or a block is
                described in two ways.

        """
        for event in events:
            medium = getattr(event, "medium", None) or ""
            self.num_events[f"{type(event).__name__} {medium}".strip()] += 1
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            for block_hash in event.block_hashes:
                key = (event.medium, _group(event), block_hash)
                if isinstance(event, BlockStored):
                    self.blocks[key] += 1
                    continue
                assert isinstance(event, BlockRemoved)
                self.blocks[key] -= 1
                if self.blocks[key] < 0:
                    raise Mismatch(f"removed, but never stored: {event}")
                if not self.blocks[key]:
                    del self.blocks[key]
            if isinstance(event, BlockStored):
                self._check_description(event)

    def held(self, medium: str) -> Counter[tuple[int, Any]]:
        """Blocks of a tier, by group and hash."""
        return Counter({k[1:]: n for k, n in self.blocks.items() if k[0] == medium})

    def _check_description(self, event: BlockStored) -> None:
        """Every event says the same of a block, on whichever tier."""
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            # Upstream's event for a group that keeps a part of its blocks.
            if event.medium == "CPU":
                raise Mismatch(f"tokens of other blocks: {event}")
            return
        for i, block_hash in enumerate(hashes):
            description = (
                tuple(event.token_ids[i * size : (i + 1) * size]),
                hashes[i - 1] if i else event.parent_block_hash,
                size,
                event.lora_id,
                # The first releases give the number only.
                getattr(event, "lora_name", None),
                *(_of_block(event, name, i) for name in DESCRIPTION),
            )
            # Upstream may describe a state by its block, or by the tokens of the last
            # hash, and the tier's events follow it.
            key = (_group(event), block_hash, size)
            if description != self._descriptions.setdefault(key, description):
                raise Mismatch(f"{self._descriptions[key]} became {description}")


class Subscriber:
    """Receives the stream of a `ZmqEventPublisher`.

    Args:
        endpoint: Where it publishes; need not be there yet.

    """

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.num_batches = 0

    def receive(self, timeout_s: float) -> list[Any] | None:
        """Events of the next batch; None if there is none in time.

        Raises:
            Mismatch: A batch was lost.

        """
        if not self._socket.poll(timeout_s * 1e3):
            return None
        _, seq, payload = self._socket.recv_multipart()
        if int.from_bytes(seq, "big") != self.num_batches:
            raise Mismatch(f"lost a batch: {seq!r} after {self.num_batches}")
        self.num_batches += 1
        return self._decode(payload).events

    def close(self) -> None:
        self._socket.close(linger=0)


def replayed(endpoint: str, since: int) -> list[int]:
    """Ask a `ZmqEventPublisher` for the batches from number `since` on.

    Returns:
        The numbers of those that it sends again.

    Raises:
        Mismatch: No answer came.

    """
    numbers: list[int] = []
    socket: zmq.Socket
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.set_hwm(0)
        socket.connect(endpoint)
        socket.send_multipart((b"", since.to_bytes(8, "big")))
        while socket.poll(30e3):
            *_, seq, payload = socket.recv_multipart()
            if not payload:
                return numbers
            numbers.append(int.from_bytes(seq, "big"))
    raise Mismatch(f"no answer to a replay after {numbers}")
