# SPDX-License-Identifier: Apache-2.0
"""Counts of what the tier did, from the block pool to the stat loggers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Samples kept for a stat logger. Without one they are never taken.
_MAX_SAMPLES = 1000

Stats = TypeVar("Stats")


def _take(stats: Stats, new: Stats) -> Stats:
    """Copy `stats`, and reset it to `new`.

    Called in each step; `dataclasses.replace` takes ten times as long.
    """
    taken = object.__new__(type(stats))
    vars(taken).update(vars(stats))
    vars(stats).update(vars(new))
    return taken


@dataclass
class SecondaryStats:
    """What one secondary tier did since the last report, and its state."""

    stored_blocks: int = 0
    """Blocks written to it."""
    stored_bytes: int = 0
    """Bytes of these objects, without their headers."""
    refused_blocks: int = 0
    """Blocks that it did not take on some rank."""
    dropped_blocks: int = 0
    """Blocks that left the host before their turn to be written."""
    loaded_blocks: int = 0
    """Blocks read from it into slots."""
    loaded_bytes: int = 0
    loaded_tokens: int = 0
    """Prompt tokens of these blocks, all groups of layers together."""
    hit_tokens: int = 0
    """Prompt tokens of blocks read from it that a request has hit since, once for each
    block."""
    evicted_bytes: int = 0
    """Bytes that this engine evicted from it, on all ranks."""
    missed_blocks: int = 0
    """Blocks that it had listed but did not deliver, or only in part."""
    overtaken_blocks: int = 0
    """Blocks that a request computed while they were being fetched for it."""
    late_requests: int = 0
    """Requests that stopped waiting for it."""
    due_blocks: int = 0
    """Blocks that wait to be written."""
    writing_blocks: int = 0
    """Slots that are being written."""
    filling_blocks: int = 0
    """Slots that are being filled, however late that ends."""
    is_closed: int = 0
    """1 while it is not read from, because it was too slow, or slower than
    computing."""
    times: list[tuple[str, int, float]] = field(default_factory=list)
    """(`put` or `get`, blocks, seconds on the slowest rank) of each job that ended."""

    def record_job(self, kind: str, num_blocks: int, seconds: float) -> None:
        """Record a job that ended."""
        if len(self.times) < _MAX_SAMPLES:
            self.times.append((kind, num_blocks, seconds))

    def take(self) -> "SecondaryStats":
        """Return the counts since the last call, and reset them."""
        return _take(self, SecondaryStats())


@dataclass
class KVTierStats:
    """What the tier did since the last report, and its fill level."""

    device_hit_tokens: int = 0
    """Prompt tokens of admitted requests from the device cache."""
    host_hit_tokens: int = 0
    """Prompt tokens of admitted requests from host slots."""
    resumed_device_hit_tokens: int = 0
    """The same for requests that were preempted before."""
    resumed_host_hit_tokens: int = 0
    resumed_from_host: int = 0
    """Times that a preempted request continued with blocks from host slots."""
    jumped_tokens: int = 0
    """Prompt tokens that running requests skipped, since they had been fetched or
    computed meanwhile. No hits, which are counted at admission."""
    meeting_points: list[float] = field(default_factory=list)
    """For each request that met what was fetched for it: the part of its prompt before
    the first jump."""
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_ahead_blocks: int = 0
    promoted_blocks: int = 0
    neighbour_blocks: int = 0
    """Of the loaded blocks, those from slots of other engines of the pool."""
    deferred_requests: int = 0
    recomputed_lookups: int = 0
    evicted_slots: int = 0
    superseded_slots: int = 0
    """Of these, slots with ends of windows or states that a later turn had replaced."""
    refused_no_slot: int = 0
    """Stores for which the plan used every slot."""
    refused_pinned: int = 0
    """Stores that would have replaced a slot in use by the plan."""
    dropped_blocks: int = 0
    """Blocks that the device evicted and the host could not take."""
    passed_over_blocks: int = 0
    """Blocks that the device evicted before they were used often enough."""
    released_blocks: int = 0
    """Blocks of finished conversations, on the device or the host."""
    refused_hints: int = 0
    """Requests whose hints were invalid and ignored."""
    hints: dict[str, int] = field(default_factory=dict)
    """Hints by kind, of requests and after them."""
    retained_blocks: int = 0
    """Blocks that requests asked to keep, counted each time."""
    yielded_slots: int = 0
    """Slots that were evicted although retained."""
    tenant_slots: dict[str, int] = field(default_factory=dict)
    """Number of slots of each tenant with a quota."""
    given_back_pages: int = 0
    """Pages of device memory that were given back."""
    mapped_pages: int = 0
    """Pages of device memory that got memory again."""
    map_seconds: float = 0.0
    unmap_seconds: float = 0.0
    """Seconds of the driver to map and unmap pages."""
    device_mapped_bytes: int = 0
    device_unmapped_bytes: int = 0
    """Bytes of device memory, on all ranks together."""
    prewarmed_blocks: int = 0
    """Full blocks of prompts to prewarm."""
    prewarmed_used_blocks: int = 0
    """Of these, blocks that another request hit."""
    prewarmed_late_blocks: int = 0
    """Of these, blocks that another request computed before the prewarm had ended."""
    slots_used: int = 0
    slots_total: int = 0
    """Slots that are open."""
    reserved_slots: int = 0
    """Slots when all are open."""
    slot_bytes: int = 0
    cleaner_backlog_blocks: int = 0
    load_seconds_per_block: float = 0.0
    prefill_seconds_per_block: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """By kind, as in `StepReport`."""
    request_hits: list[tuple[int, int]] = field(default_factory=list)
    """Device and host hit tokens of each new request with a hit."""
    times: list[tuple[str, int, float]] = field(default_factory=list)
    """(kind, blocks, seconds), as in `StepReport`."""
    secondary: dict[str, SecondaryStats] = field(default_factory=dict)
    """By label of the secondary tier."""

    def take(self) -> "KVTierStats":
        """Return the counts since the last call, and reset them."""
        return _take(self, KVTierStats())

    def record_hit(
        self, request: "Request", num_tokens: int, num_host_tokens: int
    ) -> None:
        """Count the prefix hit of a request that is being admitted."""
        # A hit may end inside its last block.
        num_host_tokens = min(num_host_tokens, num_tokens)
        num_device_tokens = num_tokens - num_host_tokens
        if request.num_preemptions > 0:
            self.resumed_device_hit_tokens += num_device_tokens
            self.resumed_host_hit_tokens += num_host_tokens
            self.resumed_from_host += num_host_tokens > 0
        else:
            self.device_hit_tokens += num_device_tokens
            self.host_hit_tokens += num_host_tokens
            if num_tokens and len(self.request_hits) < _MAX_SAMPLES:
                self.request_hits.append((num_device_tokens, num_host_tokens))

    def record_meeting(self, num_before: int, num_tokens: int) -> None:
        """Record the first jump of a request, over what was fetched for it."""
        if len(self.meeting_points) < _MAX_SAMPLES:
            self.meeting_points.append(num_before / num_tokens)

    def record_report(
        self,
        failures: Mapping[str, int],
        times: Mapping[tuple[str, int], tuple[int, float]],
    ) -> None:
        """Count what the ranks reported."""
        for kind, count in failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + count
        if len(self.times) < _MAX_SAMPLES:
            self.times += (
                (kind, num_blocks, seconds)
                for (kind, _), (num_blocks, seconds) in times.items()
            )
