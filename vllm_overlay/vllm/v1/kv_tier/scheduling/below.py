# SPDX-License-Identifier: Apache-2.0
"""What the scheduler must know of the tier below, and when there can be one."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls
from vllm.v1.kv_tier.stores.settings import SECONDARY_TIERS as _FLAG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of all ranks together: enough for all threads of a rank, and little to wait for.
_MAX_JOB_BYTES = 64 << 20
# Part of the slots that may be on their way to a tier: steps can be a quarter of a
# second apart, and gigabytes be written meanwhile.
_MAX_WRITING = 1 / 4

_MAX_KEY_BYTES = 64

Exists = Callable[[Sequence[bytes]], list[bool]]
"""Whether objects of these names are there, on all ranks. May take its time."""


def _nothing(pool: Any) -> None:
    pass


class Asks(Protocol):
    """Asks the tier below what it has, without making anybody wait."""

    ask_s: float
    """Seconds that the last answer took."""

    def ask(self, keys: Sequence[bytes]) -> int:
        """Returns the number of the question, which is not 0."""

    def take_answer(self, number: int, until: float = 0.0) -> list[bool] | None:
        """For each key of a question whether it is there; None: no answer yet, although
        it was waited for until then (`time.monotonic`)."""

    def has(self, keys: Sequence[bytes]) -> None:
        """The tier has `keys` from now on, whatever it has answered before."""


@dataclass(frozen=True)
class SecondaryTier:
    """One tier below the host as it was opened."""

    name: str
    """For messages."""
    label: str
    """Of its metrics."""
    locality: str
    """`LOCAL` or `REMOTE`, as in upstream's events."""
    asker: Asks
    store_from_use: int
    """Write a slot from its n-th use on."""
    deadline_s: float
    """How long a request waits for it, from its first look at the prefix on."""
    fetches_always: bool = False
    """Whether it is waited for also where computing takes less time."""
    flush_s: float = 0.0
    """How long the engine writes to it before it ends."""


@dataclass(frozen=True)
class SecondaryLayout:
    """The tiers below the host as they were opened."""

    tiers: tuple[SecondaryTier, ...]
    """In the order in which they are asked."""
    num_ranks: int
    """That have an object each for a block."""
    block_sizes: tuple[int, ...]
    """Tokens of a block, of each KV cache group."""
    max_writing: int
    """Slots that are on their way to a tier at a time."""
    max_job: int
    """Slots of a job: ranks tell of the end of each."""
    max_known: int
    """Keys that are remembered as being there, for each tier."""
    tokens_per_block: float
    """Tokens whose KV takes one block, over all groups together."""
    rank_calls: RankCalls = field(default_factory=RankCalls, compare=False)
    """Tell of what may change weights."""
    begun: Callable[[Any], None] = field(default=_nothing, compare=False)
    """Takes the pool of the engine when it is made."""

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens that so many blocks stand for, of all groups alike."""
        return round(num_blocks * self.tokens_per_block)


def layout(
    tiers: Sequence[SecondaryTier],
    num_ranks: int,
    block_sizes: Sequence[int],
    num_slots: int,
    slot_bytes: int,
    tokens_per_block: float,
) -> SecondaryLayout:
    """The tiers below a host tier.

    Args:
        tiers: In the order in which they are asked.
        num_ranks: That have KV memory.
        block_sizes: Tokens of a block, of each KV cache group.
        num_slots: Of the host tier.
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
    """The keys of objects of these blocks. Where a block has many hashes, some releases
    have all of them as its key: too long for the name of a file."""
    if max(map(len, keys), default=0) <= _MAX_KEY_BYTES:
        return list(keys)
    return [
        hashlib.blake2b(key, digest_size=_MAX_KEY_BYTES).digest()
        if len(key) > _MAX_KEY_BYTES
        else key
        for key in keys
    ]


def labels(types: Sequence[str]) -> list[str]:
    """Of metrics: the types of tiers, numbered where one type stands there twice."""
    return [
        kind if types.count(kind) == 1 else f"{kind}-{types[: i + 1].count(kind)}"
        for i, kind in enumerate(types)
    ]


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that a tier below does not go with yet.

    Raises:
        ValueError: The message says what to change.

    """
    if not releases.keys_are_bytes():
        raise ValueError(
            f"{_FLAG} is not supported with this release of vLLM, whose block hashes "
            "are numbers of one process. Remove it."
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
