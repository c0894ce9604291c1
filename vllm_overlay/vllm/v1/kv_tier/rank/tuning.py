# SPDX-License-Identifier: Apache-2.0
"""Constants of a rank's copies, as one value, with the reason for each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankTuning:
    """Constants that users do not set. Tests and simulations choose other values.

    Sizes are in bytes. Names that end in `_s` are in seconds.
    """

    # ------------------------------------------------------- sizes of copies

    part_bytes: int = 64 << 20
    """Least size of a part of a load that layers wait for: a millisecond on a fast
    link, a tenth of which goes into the launch."""

    max_parts: int = 16
    """Most parts of a step's load. Each takes events and a launch."""

    load_chunk_bytes: int = 64 << 20
    """Size of a load that no step waits for. Small enough that more urgent copies can
    go first, and long enough that the thread queues the next one in time."""

    store_chunk_bytes: int = 32 << 20
    """As `load_chunk_bytes`, for stores. Smaller, since the tokens of every step queue
    behind them on the way to the host."""

    chunk_launch_s: float = 0.3e-3
    """Most CPU time for the launch of a chunk; chunks get smaller where needed."""

    long_launch_s: float = 0.5e-3
    """A thread launches loads that would hold up the launch of a step for longer."""

    # ------------------------------------------------------- threads and gates

    store_parts_in_flight: int = 1
    """Chunks of stores queued on the device, besides the one that is being launched.
    More would hold up tokens on their way to the host."""

    ahead_parts_in_flight: int = 6
    """Chunks of loads ahead queued on the device: eight milliseconds on a fast link, by
    which a thread may be late under load."""

    urgent_parts_in_flight: int = 10
    """As the two above, for a job whose launch is waited for. More would fill the
    launch queue (1,024 copies), and the next launch would wait for it with the driver's
    lock held."""

    gate_s: float = 0.02
    """How long the launch of a step may hold up one chunk of stores."""

    fence_look_s: float = 4e-3
    """Interval at which a thread polls for a copy's dependencies while the copy is not
    urgent. Each poll takes the GIL from a step that is launched kernel by kernel: with
    polls every half millisecond a launch took 37 ms (H100), against 18 to 22 without
    the tier."""

    look_s: float = 1e-3
    """Interval at which the host polls for the end of a copy that may hang."""

    switch_interval_s: float = 0.5e-3
    """Longest wait for the GIL, for threads that launch copies, and for steps that
    released it in a driver call. With Python's 5 ms, the link runs idle."""

    end_within_s: float = 10.0
    """How long a thread may take to end with its tier."""

    idle_wait_s: float = 1e-3
    """How long a step that runs nothing waits for secondary tiers. A request that
    arrives meanwhile waits too."""

    idle_read_s: float = 16e-3
    """The same while blocks are read for a request, unless enough jobs end before. A
    step that runs nothing took 2 to 13 ms next to eight reading threads (H100), and
    slowed these down by half."""

    after_read_s: float = 0.1
    """How long writes to secondary tiers pause after a read, when the blocks are loaded
    and a step is launched. Without the pause, writing threads took the GIL, and the
    loads of such a step were 40 ms late (H100)."""

    max_put_delay_s: float = 1.0
    """Longest total delay of writes by reads, so that reads that hang do not stop
    writes."""

    put_gate_s: float = 0.06
    """How long the launch of a step may hold up each write of an object to a secondary
    tier. With eight writing threads a launch took 1.2 to 1.6 times as long without this
    limit, and 1.1 times with it (`store_rate.py --busy`). Launching a prompt of an 8B
    model kernel by kernel takes 20 ms, and 30 to 55 if writes go on before its end. Not
    longer, since on a CPU the launch includes the forward pass."""

    peer_look_s: float = 0.1e-3
    """Interval at which a copy polls the progress of another rank. It only reads a few
    numbers in memory, and a step may wait for it."""

    # ------------------------------------------------------- copies that hang

    limit_s: float = 30.0
    """A copy that takes longer counts as hanging. The longest take some seconds, with a
    slow link and unpinned memory."""

    old_s: float = 1.0
    """A job that was queued longer ago must have ended before a stream may wait for it,
    since a stream's wait cannot be cancelled."""

    grace_s: float = 5.0
    """Time beyond `limit_s` for a copy that is not waited for, since a busy process may
    have checked late."""

    # ------------------------------------------------------- what is measured

    prefill_tokens: int = 1024
    """Least tokens of a step from which the cost of prefill is measured. Steps with
    fewer prefill tokens tell what it takes a request to join."""

    prefill_tokens_each: int = 64
    """The same for each of its requests, or most of them would be decoding."""


DEFAULT_TUNING = RankTuning()
