# SPDX-License-Identifier: Apache-2.0
"""A worker extension for servers that damages the host tier from outside."""

import gc
from typing import Any


class SpoilSlots:
    """For `--worker-extension-cls`; reached by POST /collective_rpc."""

    vllm_config: Any
    rank: int

    def spoil_all_slots(self, replica: int) -> None:
        """Move the bytes of every slot of one data parallel replica."""
        config = self.vllm_config.parallel_config
        # Releases without such an index run one engine here.
        if getattr(config, "data_parallel_index", 0) == replica:
            self._spoil()

    def spoil_slots_of_rank(self, rank: int) -> None:
        """The same of one rank."""
        if self.rank == rank:
            self._spoil()

    def _spoil(self) -> None:
        """Whole numbers at a time: anything else can make NaNs, which would stay in the
        device block and harm whoever has it next."""
        from vllm.v1.kv_tier.worker.host_tier import HostTier

        # Engines that run their worker themselves freeze what they have made, and the
        # collector lists nothing that is frozen.
        gc.unfreeze()
        # Not isinstance: some objects answer __class__ with an exception.
        (tier,) = (o for o in gc.get_objects() if type(o) is HostTier)
        slots = tier.buffer.slots
        slots.copy_(slots.roll(slots.shape[1] // 3 // 8 * 8, dims=1))
