# SPDX-License-Identifier: Apache-2.0
"""What the host tier did, from the pool to the stat loggers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.v1.kv_tier.plan import StepReport
    from vllm.v1.request import Request

# Samples that are kept for a stat logger. Where nobody logs, nobody takes them.
_MAX_SAMPLES = 1000


Stats = TypeVar("Stats")


def _take(stats: Stats, new: Stats) -> Stats:
    """A copy of `stats`, which becomes as `new` is. Each step comes by here, and
    `dataclasses.replace` takes ten times as long."""
    taken = object.__new__(type(stats))
    vars(taken).update(vars(stats))
    vars(stats).update(vars(new))
    return taken


@dataclass
class SecondaryStats:
    """What one tier below the host did since the last report, and its state."""

    stored_blocks: int = 0
    """Blocks that it took."""
    refused_blocks: int = 0
    """Blocks that it did not take, on some rank."""
    dropped_blocks: int = 0
    """Blocks that were to be written and left the host before their turn."""
    loaded_blocks: int = 0
    """Blocks that came from it into slots."""
    loaded_tokens: int = 0
    """Prompt tokens that these cover, all groups of layers together."""
    hit_tokens: int = 0
    """Prompt tokens of blocks that came from it and that a request has hit since, each
    block counted once."""
    evicted_bytes: int = 0
    """Of what this engine removed to make room in it, on all ranks."""
    missed_blocks: int = 0
    """Blocks that it had named and that did not come, or not whole."""
    late_requests: int = 0
    """Requests that went on without what had not come by their deadline."""
    due_blocks: int = 0
    """Blocks that wait to be written."""
    writing_blocks: int = 0
    """Slots that are kept since they are being written."""
    filling_blocks: int = 0
    """Slots that are kept since they are being filled, however late that ends."""
    is_closed: int = 0
    """1 while nothing is fetched from it, because it was too slow, or slower than
    computing."""
    times: list[tuple[str, int, float]] = field(default_factory=list)
    """(`put` or `get`, blocks, seconds on the slowest rank) of each job that ended."""

    def record_job(self, kind: str, num_blocks: int, seconds: float) -> None:
        """A job ended."""
        if len(self.times) < _MAX_SAMPLES:
            self.times.append((kind, num_blocks, seconds))

    def take(self) -> "SecondaryStats":
        """What was counted since the last call. Counting begins anew."""
        return _take(self, SecondaryStats())


@dataclass
class KVTierStats:
    """What the tier did since the last report, and its fill."""

    device_hit_tokens: int = 0
    """Prompt tokens of admitted requests that the device cache had."""
    host_hit_tokens: int = 0
    """Prompt tokens of admitted requests that came from host slots."""
    resumed_device_hit_tokens: int = 0
    """As above, for requests that were preempted before."""
    resumed_host_hit_tokens: int = 0
    resumed_from_host: int = 0
    """Times that a preempted request went on with blocks from host slots."""
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_ahead_blocks: int = 0
    promoted_blocks: int = 0
    deferred_requests: int = 0
    recomputed_lookups: int = 0
    evicted_slots: int = 0
    refused_no_slot: int = 0
    """Stores for which every slot was in use by the plan."""
    refused_pinned: int = 0
    """Stores that would replace a slot in use by the plan."""
    dropped_blocks: int = 0
    """Blocks that the device evicted and the host could not take."""
    passed_over_blocks: int = 0
    """Blocks that the device evicted before they had been used often enough."""
    released_blocks: int = 0
    """Blocks of conversations that are over, wherever they lay."""
    refused_hints: int = 0
    """Requests whose hints were not understood, and ignored."""
    hints: dict[str, int] = field(default_factory=dict)
    """Hints by kind, of requests and after them."""
    retained_blocks: int = 0
    """Blocks, each time that a request asks to keep them."""
    yielded_slots: int = 0
    """Slots that made room though they were retained."""
    tenant_slots: dict[str, int] = field(default_factory=dict)
    """What each tenant with a quota has."""
    given_back_pages: int = 0
    """Pages of device memory whose blocks went to the host and out of the device."""
    mapped_pages: int = 0
    """Pages of device memory that were taken again."""
    map_seconds: float = 0.0
    unmap_seconds: float = 0.0
    """That the driver took to map and unmap pages."""
    device_mapped_bytes: int = 0
    device_unmapped_bytes: int = 0
    """Of device memory, on all ranks together."""
    prewarmed_blocks: int = 0
    """Full blocks of prompts that are to be prewarmed."""
    prewarmed_used_blocks: int = 0
    """Of these, what another request hit."""
    prewarmed_late_blocks: int = 0
    """Of these, what another request computed before the prewarm had ended."""
    slots_used: int = 0
    slots_total: int = 0
    slot_bytes: int = 0
    cleaner_backlog_blocks: int = 0
    load_seconds_per_block: float = 0.0
    prefill_seconds_per_block: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """By kind, as in `StepReport`."""
    request_hits: list[tuple[int, int]] = field(default_factory=list)
    """Device and host hit tokens of each new request that hit something."""
    times: list[tuple[str, int, float]] = field(default_factory=list)
    """(kind, blocks, seconds), as in `StepReport`."""
    secondary: dict[str, SecondaryStats] = field(default_factory=dict)
    """Of the tiers below the host, by their labels."""

    def take(self) -> "KVTierStats":
        """What was counted since the last call. Counting begins anew."""
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

    def record_report(self, report: "StepReport") -> None:
        """Count what the ranks measured."""
        for kind, count in report.failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + count
        if len(self.times) < _MAX_SAMPLES:
            self.times += (
                (kind, num_blocks, seconds)
                for (kind, _), (num_blocks, seconds) in report.times.items()
            )
