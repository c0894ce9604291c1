# SPDX-License-Identifier: Apache-2.0
"""Describes secondary tiers to the scheduler, and checks whether they are supported."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls
from vllm.v1.kv_tier.stores.settings import SECONDARY_TIERS as _FLAG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# For all ranks together: enough for all threads of a rank, but short.
_MAX_JOB_BYTES = 64 << 20
# Part of the slots that may be in writes at a time: steps can be a quarter of a second
# apart, in which gigabytes are written.
_MAX_WRITING = 1 / 4

_MAX_KEY_BYTES = 64

Exists = Callable[[Sequence[bytes]], list[bool]]
"""Whether objects of these keys exist on all ranks. May block."""


def _nothing(pool: Any) -> None:
    pass


class Asks(Protocol):
    """Asks a store which blocks it has, without blocking the caller."""

    ask_s: float
    """Seconds that the last answer took."""

    def ask(self, keys: Sequence[bytes]) -> int:
        """Queue a question. Returns its number, which is not 0."""

    def take_answer(self, number: int, until: float = 0.0) -> list[bool] | None:
        """Whether each key of a question exists; None without an answer by `until`."""

    def has(self, keys: Sequence[bytes]) -> None:
        """Note that the store has `keys` from now on, whatever it answered before."""


@dataclass(frozen=True)
class SecondaryTier:
    """One secondary tier, opened."""

    name: str
    """Name for messages."""
    label: str
    """Label of its metrics."""
    locality: str
    """`LOCAL` or `REMOTE`, as in upstream's events."""
    asker: Asks
    store_from_use: int
    """Write a slot from its n-th use on."""
    deadline_s: float
    """Longest wait of a request for this tier, from its first lookup on."""
    fetches_always: bool = False
    """Whether requests wait for it even where computing is faster."""
    flush_s: float = 0.0
    """How long the engine writes to it before it ends."""


@dataclass(frozen=True)
class SecondaryLayout:
    """The secondary tiers, opened."""

    tiers: tuple[SecondaryTier, ...]
    """In the order in which they are asked."""
    num_ranks: int
    """Number of ranks with an object for each block."""
    block_sizes: tuple[int, ...]
    """Tokens of a block, for each KV cache group."""
    max_writing: int
    """Most slots that are being written to a tier."""
    max_job: int
    """Most slots in a job. Ranks report the end of each job."""
    max_known: int
    """Most keys per tier that are remembered as stored."""
    tokens_per_block: float
    """Tokens whose KV takes one block, over all groups together."""
    rank_calls: RankCalls = field(default_factory=RankCalls, compare=False)
    """Reports calls that may change weights."""
    begun: Callable[[Any], None] = field(default=_nothing, compare=False)
    """Takes the pool of the engine when it is made."""

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens of `num_blocks` blocks, over all groups alike."""
        return round(num_blocks * self.tokens_per_block)


def layout(
    tiers: Sequence[SecondaryTier],
    num_ranks: int,
    block_sizes: Sequence[int],
    num_slots: int,
    slot_bytes: int,
    tokens_per_block: float,
) -> SecondaryLayout:
    """Make the description of a host tier's secondary tiers.

    Args:
        tiers: In the order in which they are asked.
        num_ranks: Number of ranks with KV memory.
        block_sizes: Tokens of a block, for each KV cache group.
        num_slots: Number of host slots.
        slot_bytes: Bytes of a slot on all ranks together.
        tokens_per_block: Tokens whose KV takes one block, over all groups together.

    """
    return SecondaryLayout(
        tuple(tiers),
        num_ranks,
        tuple(block_sizes),
        max_writing=max(1, int(_MAX_WRITING * num_slots)),
        max_job=max(1, _MAX_JOB_BYTES // slot_bytes),
        max_known=4 * num_slots,
        tokens_per_block=tokens_per_block,
    )


def object_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Keys of the objects for these blocks.

    In some releases a block's key concatenates many hashes, too long for a file name;
    it is hashed then.
    """
    if max(map(len, keys), default=0) <= _MAX_KEY_BYTES:
        return list(keys)
    return [
        hashlib.blake2b(key, digest_size=_MAX_KEY_BYTES).digest()
        if len(key) > _MAX_KEY_BYTES
        else key
        for key in keys
    ]


def labels(types: Sequence[str]) -> list[str]:
    """Labels for metrics: types of the tiers, numbered where a type occurs twice."""
    return [
        kind if types.count(kind) == 1 else f"{kind}-{types[: i + 1].count(kind)}"
        for i, kind in enumerate(types)
    ]


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that does not support secondary tiers.

    Raises:
        ValueError: The message says what to change.

    """
    if not releases.keys_are_bytes():
        raise ValueError(
            f"{_FLAG} is not supported with this release of vLLM, whose block hashes "
            "are valid in one process only. Remove secondary_tiers."
        )
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return
    if not releases.describes_hits():
        raise ValueError(
            f"{_FLAG} is not supported with KV events (--kv-events-config) in this "
            "release of vLLM, which describes only blocks that it has computed. Remove "
            "one of the two."
        )
