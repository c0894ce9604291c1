# SPDX-License-Identifier: Apache-2.0
"""Opens the host slots of a rank while the engine serves requests, and closes them."""

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.buffer import GiB, HostBuffer, Refused
from vllm.v1.kv_tier.memory.limits import available_host_bytes
from vllm.v1.kv_tier.plan import OpenSlots

logger = init_logger(__name__)

FIRST_BYTES = GiB
"""What a rank opens before its engine serves requests: a quarter of a second."""
PIECE_BYTES = GiB // 16
"""What it opens at a time afterwards. The driver takes some 15 ms to register it, for
which the launch of a step may have to wait."""
_PAUSE = 1.0
"""Seconds of pause for each second of work, which uses the bandwidth of the memory."""
_PROGRESS_S = 30.0


class SlotOpener:
    """Opens and closes slots in a thread, a piece at a time, and pauses between pieces.

    Args:
        buffer: The slots. Nothing else may open any.
        piece_bytes: Bytes of a piece, about.
        pause: Seconds of pause for each second of work.
        available: Bytes of memory that the machine has available; None: do not ask.

    """

    def __init__(
        self,
        buffer: HostBuffer,
        piece_bytes: int = PIECE_BYTES,
        pause: float = _PAUSE,
        available: Callable[[], int] | None = available_host_bytes,
    ) -> None:
        self._buffer = buffer
        self._piece_bytes = piece_bytes
        self._pause = pause
        self._available = available
        self._state = self._reported = OpenSlots(0, buffer.num_open, True)
        self._begun = self._logged = 0.0
        self._aims: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        weakref.finalize(self, self._aims.put, None)
        self._is_started = False

    def aim(self, number: int, num_slots: int) -> None:
        """Let the thread open or close slots until so many are open.

        Pieces that have some of these stay open as a whole.

        Args:
            number: Counts the calls. `take` returns it with what was done since.
            num_slots: Slots that should be open: the first ones. Nothing uses others.

        """
        self._aims.put((number, num_slots))
        if not self._is_started:
            self._is_started = True
            threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._aims),
                name="kv-tier-open",
                daemon=True,
            ).start()

    def take(self) -> OpenSlots | None:
        """The state, if it has changed since the last call."""
        state = self._state
        if state is self._reported:
            return None
        self._reported = state
        return state

    def begin(self) -> None:
        """Start the thread."""
        self._buffer.begin_thread()
        self._begun = self._logged = time.monotonic()

    def step(self, number: int, num_slots: int) -> float | None:
        """Open or close a piece.

        Args:
            number: As for `aim`.
            num_slots: As for `aim`.

        Returns:
            Seconds to pause; None if there is nothing more to do.

        """
        begun, buffer = time.monotonic(), self._buffer
        if buffer.num_open < num_slots:
            is_done = not self._open_piece() or buffer.num_open >= num_slots
        else:
            is_done = not buffer.close_last(num_slots)
        self._state = OpenSlots(number, buffer.num_open, is_done)
        self._log(is_done)
        return None if is_done else self._pause * (time.monotonic() - begun)

    def _open_piece(self) -> bool:
        """Returns whether it is open."""
        try:
            if self._available is not None and self._available() < self._piece_bytes:
                raise MemoryError("the machine has no memory available")
            self._buffer.open_next(self._piece_bytes)
        except Refused as e:
            reason = f"the GPU driver refused to register it (error {e.args[0]})"
        except (OSError, MemoryError) as e:
            reason = str(e)
        else:
            return True
        logger.warning(
            "KV tier: %d of %d host slots are open on this rank, and no more: %s. The "
            "engine goes on with what every rank has. Lower --kv-offloading-size to "
            "%.1f GiB for each rank (with a pool, --size of its keeper), or free "
            "memory; for a refusal of the driver, raise the memlock limit (ulimit -l "
            "unlimited).",
            self._buffer.num_open,
            len(self._buffer.slots),
            reason,
            self._buffer.num_open * self._buffer.slots.shape[1] / GiB,
        )
        return False

    def _log(self, is_done: bool) -> None:
        now = time.monotonic()
        if not is_done and now - self._logged < _PROGRESS_S:
            return
        self._logged = now
        num_slots, num_bytes = self._buffer.slots.shape
        logger.info(
            "KV tier: %.1f of %.1f GiB of host memory ready, after %.1f s.",
            self._buffer.num_open * num_bytes / GiB,
            num_slots * num_bytes / GiB,
            now - self._begun,
        )


def _run(
    of: "weakref.ref[SlotOpener]", aims: "SimpleQueue[tuple[int, int] | None]"
) -> None:
    if (opener := of()) is not None:
        opener.begin()
    del opener
    while (aim := aims.get()) is not None:
        # A later call replaces what this one has left.
        while aims.empty() and (opener := of()) is not None:
            pause_s = opener.step(*aim)
            # Only weakly while it sleeps, so that it ends with its tier.
            del opener
            if pause_s is None:
                break
            time.sleep(pause_s)
