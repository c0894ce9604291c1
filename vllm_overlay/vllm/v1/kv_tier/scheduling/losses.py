# SPDX-License-Identifier: Apache-2.0
"""Effects of failed copies: no host hits for a while, fewer device blocks for good."""

from collections.abc import Iterable

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning

logger = init_logger(__name__)


class LoadBreaker:
    """Skips the host while loads from it keep failing.

    Each failed load makes every running request start over, so an engine whose loads
    always fail would never answer. After some failures in a row lookups use the device
    only, for a time that doubles with each further failure. The next successful load
    ends this.

    Args:
        tuning: Number of failures, and times.

    """

    def __init__(self, tuning: SchedulingTuning) -> None:
        self._tuning = tuning
        self._num_failed = 0
        self._retry_s = tuning.retry_loads_s
        self._open_until = 0.0

    def take(self, report: StepReport, now: float) -> None:
        """Take in which loads failed and which succeeded."""
        if report.failed_load_seq is not None:
            self._num_failed += 1
            if self._num_failed >= self._tuning.max_failed_loads:
                self._open(now)
        elif self._num_failed and any(
            kind in ("load", "load_ahead") and time.num_blocks
            for (kind, _), time in report.times.items()
        ):
            if self._num_failed >= self._tuning.max_failed_loads:
                logger.info("KV tier: loads from host memory succeed again.")
            self._num_failed = 0
            self._retry_s = self._tuning.retry_loads_s

    def _open(self, now: float) -> None:
        if now >= self._open_until:
            logger.error(
                "KV tier: %d loads from host memory failed in a row. Prefix hits come "
                "from the device alone for %d seconds; look for the errors of the "
                "workers above.",
                self._num_failed,
                self._retry_s,
            )
        self._open_until = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._tuning.max_retry_loads_s)

    def is_open(self, now: float) -> bool:
        """Whether lookups must skip the host."""
        return now < self._open_until


class LostBlocks:
    """Device blocks that a hanging copy may overwrite at any time.

    They must not be allocated again once they are free.
    """

    def __init__(self) -> None:
        self.in_use: set[int] = set()
        """Ids of lost blocks that requests still hold."""
        self.withdrawn: set[int] = set()
        """Ids of lost blocks that were removed from the pool."""

    def add(self, block_ids: Iterable[int]) -> None:
        self.in_use |= {*block_ids} - self.withdrawn

    def take_free(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Lost blocks that became free. The caller must remove them from the pool.

        Args:
            blocks: All device blocks, by id.

        """
        free = [blocks[i] for i in self.in_use if blocks[i].ref_cnt == 0]
        ids = {block.block_id for block in free}
        self.in_use -= ids
        self.withdrawn |= ids
        return free
