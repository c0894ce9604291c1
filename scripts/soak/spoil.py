# SPDX-License-Identifier: Apache-2.0
"""The negative control: what shows that wrong bytes in host slots would be noticed."""

import gc


class Spoiler:
    """A `--worker-extension-cls`."""

    def spoil_host_slots(self) -> int:
        """Move the bytes of every host slot. Returns how many there are."""
        from vllm.v1.kv_tier.worker import HostTier

        # Not isinstance: some objects answer __class__ with an exception.
        (tier,) = (each for each in gc.get_objects() if type(each) is HostTier)
        slots = tier.buffer.slots
        # Whole numbers at a time: anything else can make NaNs, which stay in a block.
        slots.copy_(slots.roll(slots.shape[1] // 3 // 8 * 8, dims=1))
        return len(slots)
