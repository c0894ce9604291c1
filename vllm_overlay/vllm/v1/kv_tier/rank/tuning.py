# SPDX-License-Identifier: Apache-2.0
"""Numbers that a rank's copies are tuned by, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankTuning:
    """What no user sets. Tests and simulations choose other values.

    Sizes are in bytes, and names that end in `_s` are seconds.
    """

    # ------------------------------------------------------- sizes of copies

    part_bytes: int = 64 << 20
    """Least size of a part of a load that layers wait for: a millisecond on a fast
    link, of which the launch takes a tenth."""

    max_parts: int = 16
    """No load of a step has more parts than this. Each takes events and a launch."""

    load_chunk_bytes: int = 64 << 20
    """What is loaded together where no step waits. Chunks are small enough to be
    overtaken, and long enough on the device for a thread to come back in time."""

    store_chunk_bytes: int = 32 << 20
    """As `load_chunk_bytes`, for stores. Smaller, since the tokens of every step queue
    behind them on the way to the host."""

    chunk_launch_s: float = 0.3e-3
    """A chunk takes the CPU no longer than this to launch, whatever its size."""

    long_launch_s: float = 0.5e-3
    """Where loads would hold up a step's launch for longer, a thread launches them."""

    # ------------------------------------------------------- threads and gates

    store_parts_in_flight: int = 1
    """Chunks of stores that are queued on the device at a time, besides the one that is
    being launched. More would hold up tokens on their way to the host."""

    ahead_parts_in_flight: int = 6
    """Chunks of loads ahead that are queued on the device at a time: eight milliseconds
    of a fast link. A thread may be that late under load."""

    urgent_parts_in_flight: int = 10
    """As the two above, of a job whose launch somebody waits for. More would fill the
    launch queue (1,024 copies), for which whoever launches next waits with the
    driver's lock."""

    gate_s: float = 0.02
    """How long a step that is being launched holds up one chunk of stores."""

    fence_look_s: float = 4e-3
    """How often a thread looks whether what a copy waits for has come, while nobody
    waits for the copy. Each look takes Python's lock from a step that is being launched
    kernel by kernel: beside one every half millisecond that took 37 ms on an H100, and
    18 to 22 without the tier."""

    look_s: float = 1e-3
    """How often the host looks whether a copy has ended that it does not trust to."""

    switch_interval_s: float = 0.5e-3
    """A thread that launches gets Python's lock after so long at most, and so does the
    step when it gave it away for a call of the driver. With Python's own 5 ms the link
    runs dry."""

    end_within_s: float = 10.0
    """How long a thread has to end when its tier goes."""

    idle_wait_s: float = 1e-3
    """How long a step that runs nothing waits for the tier below. A request that
    arrives meanwhile waits with it."""

    idle_read_s: float = 16e-3
    """As above, while something is read, which a request waits for, unless so many jobs
    end as are of use before: a step that runs nothing took 2 to 13 ms on an H100 beside
    eight threads that read, and they took a half more meanwhile."""

    after_read_s: float = 0.1
    """How long writes to a tier below are quiet after something was read: it is loaded
    then, and a step is launched that a request waits for. Threads that write took
    Python's lock from both, and the loads of such a step came 40 ms late on an H100."""

    max_put_delay_s: float = 1.0
    """How long writes leave the way to what is read, all in all. Not for ever: what
    hangs holds up no writes."""

    put_gate_s: float = 0.06
    """How long a step that is being launched holds up each object that is written to a
    tier below: beside eight threads that write, a launch took 1.2 to 1.6 times as long,
    and 1.1 with the gate (`store_rate.py --busy`). Launched kernel by kernel, a prompt
    of an 8B model takes 20 ms, and 30 to 55 where the gate opens before. Not for
    longer, since on a CPU the forward pass is a part of the launch."""

    peer_look_s: float = 0.1e-3
    """How often a copy looks whether another rank has come so far. It reads a few
    numbers in memory, and a step may wait for it."""

    # ------------------------------------------------------- copies that hang

    limit_s: float = 30.0
    """A copy that takes longer never ends. The longest take some seconds, with a slow
    link and memory that is not pinned."""

    old_s: float = 1.0
    """What was queued longer ago must have ended before a stream is told to wait for
    it: a stream cannot be called back."""

    grace_s: float = 5.0
    """Where nobody waits: how long a copy has beyond `limit_s`, since the process may
    have been too slow to look after it."""

    # ------------------------------------------------------- what is measured

    prefill_tokens: int = 1024
    """A step with as many tokens says what prefill costs. One with less prefill says
    what it takes a request to join."""

    prefill_tokens_each: int = 64
    """As many tokens for each of its requests too: else most of them decode."""


DEFAULT_TUNING = RankTuning()
