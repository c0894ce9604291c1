# SPDX-License-Identifier: Apache-2.0
"""`keep_while_asleep`: what the host has outlives a sleep of the engine.

Upstream clears the prefix cache before an engine sleeps, since the device memory goes
away, and as it does for other weights: nobody says which of the two it is
(https://github.com/vllm-project/vllm/issues/57810). What the ranks are asked next does.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.storing import BlockStorer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_tier.scheduling.block_pool import TieredBlockPool

logger = init_logger(__name__)

_KV = "kv_cache"
_LEVEL = 1
_UNSCALED = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""Types of KV that are read as they were written: a release may set the scales of the
others anew when an engine wakes up."""


class Stage(Enum):
    """What happened last."""

    RUNS = auto()
    """A step: resets are resets."""
    CLEARED = auto()
    """The prefix cache was cleared. Nobody finds a slot until it is known why."""
    SLEEPS = auto()
    """It was for a sleep that keeps the weights. Still nobody finds a slot."""
    WOKEN = auto()
    """The slots are back. New weights come without another reset yet: whoever loads
    them after a sleep relies on the one before it."""


class Asleep:
    """Keeps slots from a reset until it is known that it was for a sleep of level 1.

    In doubt they are forgotten: at a step, a second reset, another level, or any call
    of the ranks that is not known to leave weights alone.

    Args:
        table: The slots.
        storer: Forgets them.
        calls: Of the engine to its ranks.

    """

    def __init__(self, table: SlotTable, storer: BlockStorer, calls: RankCalls) -> None:
        self.stage = Stage.RUNS
        """Public, since it is looked at in each step."""
        self._table = table
        self._storer = storer
        calls.may_change = self._weights_may_change
        calls.sleeps, calls.wakes_up = self._sleeps, self._wakes_up

    def cleared(self) -> None:
        """The prefix cache was cleared, and all that the device had with it."""
        if self.stage in (Stage.CLEARED, Stage.SLEEPS):
            # One of the two was no sleep's.
            self._forget()
            return
        # They would read what the device has after the sleep.
        self._storer.drop_unsent()
        self._table.hide()
        self.stage = Stage.CLEARED

    def begin_step(self) -> None:
        """The engine runs."""
        if self.stage is Stage.WOKEN:
            self.stage = Stage.RUNS
        else:
            self._forget()

    def _sleeps(self, options: Mapping[str, Any]) -> None:
        if self.stage is Stage.CLEARED and options.get("level") == _LEVEL:
            self.stage = Stage.SLEEPS
        elif self.stage is not Stage.RUNS:
            self._forget()

    def _wakes_up(self, options: Mapping[str, Any]) -> None:
        tags = options.get("tags")
        # Weights that are loaded anew are so before there is device memory for KV.
        if self.stage is Stage.SLEEPS and (not tags or _KV in tags):
            self._table.show()
            self.stage = Stage.WOKEN
            logger.info(
                "KV tier: %d host slots were kept while the engine slept.",
                len(self._table),
            )

    def _weights_may_change(self, method: str) -> None:
        if self.stage is Stage.RUNS:
            return
        logger.info(
            "KV tier: %d host slots are forgotten, since %s of the ranks was called, "
            "which may change weights.",
            len(self._table),
            method,
        )
        self._forget()

    def _forget(self) -> None:
        self._storer.drop_all()
        self._table.show()
        self.stage = Stage.RUNS


def keep_while_asleep(pool: "TieredBlockPool", calls: RankCalls) -> None:
    """Let `pool` keep its slots while the engine sleeps.

    Args:
        pool: Of the engine.
        calls: Of the engine to its ranks.

    """
    asleep = Asleep(pool.host, pool.storer, calls)
    begin_step = pool.begin_step

    def begin() -> None:
        if asleep.stage is not Stage.RUNS:
            asleep.begin_step()
        begin_step()

    pool.begin_step = begin  # type: ignore[method-assign]
    pool.forget_slots = asleep.cleared


def check_asleep(keeps: bool, has_tiers_below: bool, vllm_config: "VllmConfig") -> None:
    """Refuse `keep_while_asleep` beside what does not know of it yet.

    Raises:
        ValueError: The message names both settings, and the mend.

    """
    events = getattr(vllm_config, "kv_events_config", None)
    cache = getattr(vllm_config, "cache_config", None)
    dtype = getattr(cache, "cache_dtype", "auto")
    others = {
        "secondary_tiers": has_tiers_below,
        "--kv-events-config": getattr(events, "enable_kv_cache_events", False),
        f"--kv-cache-dtype {dtype}": dtype not in _UNSCALED,
    }
    for name, is_set in others.items():
        if keeps and is_set:
            raise ValueError(
                f"--kv-offloading-config: keep_while_asleep and {name} do not go "
                "together yet. Remove one of them."
            )
