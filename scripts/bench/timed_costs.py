# SPDX-License-Identifier: Apache-2.0
"""The GPU of `timed_model.py`: what its work costs, and when it ends."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What the model does not run, in seconds."""

    load: float = 42e-6  # a block, from host to device
    store: float = 46.6e-6  # a block, from device to host
    decode: float = 6.5e-3  # a forward pass of a few tokens
    mixed: float = 17e-3  # at least, a forward pass in which a request joins
    prefill: float = 29e-6  # a prompt token, on top of `decode`
    launch: float = 1.5e-3  # the engine's thread, for a step of decoding requests
    launch_mixed: float = 13e-3  # the same, where one joins: graphs of pieces
    prepare: float = 0.7e-3  # from the launch until the device begins
    last_layer: float = 1e-3  # of a forward pass after the last load
    send: float = 2e-3  # from client to scheduler
    send_token: float = 0.6e-6  # a prompt token, on top of `send`
    receive: float = 1.5e-3  # from scheduler to client
    pause: float = 1e-3  # of the engine after a step with nothing to run
    scale_cpu: float = 1.0  # of the scheduler, against this machine


class Ends:
    """When the work of each plan ends; no plan's work ends before an earlier one's."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._ends: list[float] = []

    def add(self, seq: int, end: float) -> None:
        self._seqs.append(seq)
        self._ends.append(end)

    @property
    def last(self) -> float:
        """When all of the work ends."""
        return self._ends[-1] if self._ends else 0.0

    def delay(self, after: float, by: float) -> None:
        """What has not ended at `after` ends `by` seconds later."""
        self._ends = [end + by if end > after else end for end in self._ends]

    def up_to(self, seq: int) -> float:
        """When all of the plans up to `seq` have ended."""
        i = bisect_right(self._seqs, seq)
        return self._ends[i - 1] if i else 0.0
