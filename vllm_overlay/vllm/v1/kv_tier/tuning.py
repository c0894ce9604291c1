# SPDX-License-Identifier: Apache-2.0
"""Numbers that are tuned, each with its reason: of the scheduler, and of a rank's
copies.

None of them is a setting: users need not know them. Tests choose others, and the
simulator draws them at random, since no value may make an answer wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulingTuning:
    """Constants of promotion, prefetching, storing and the cost model."""

    num_recent: int = 16
    """Blocks at the head of the free queue that are checked for use by a step in
    flight. Loads into such a block would wait for that step."""

    max_waits: int = 4
    """How often a request may wait for loads before it is admitted with them. Requests
    that go first may take its blocks again."""

    min_prefetch: int = 64
    """Least number of blocks that are worth a plan's prefetches for a request that
    cannot run yet."""

    max_prefetch: int = 2048
    """Most blocks that one plan prefetches for a request while others run. Each takes
    the scheduler some microseconds, which all others wait for. Later plans prefetch the
    rest, during the loads."""

    spare: float = 1 / 32
    """Part of the device blocks that prefetches leave to running requests. A request
    that takes a prefetched block waits for its load."""

    claim_within_s: float = 1.0
    """Seconds for which prefetched blocks are kept for their request. It may have been
    aborted, of which the tier is not notified."""

    max_page_looks: int = 8_192
    """Most device blocks that a step looks at, and removes, to release memory. Requests
    wait for it some milliseconds at most."""

    min_stores: int = 128
    """Blocks that the cleaner may store in a step even if steps allocate fewer."""

    idle_stores: int = 256
    """The same in a step that runs nothing. A request that arrives waits for it."""

    idle_pause_s: float = 0.005
    """Seconds between steps of an engine that runs nothing until device memory is
    released. A request that arrives waits for it."""

    stores_during_loads: int = 32
    """The same in a step that waits for loads, or for reads from secondary tiers.
    Copies use the host's memory bandwidth, and take the GIL from the launch of the
    step. (16,384 tokens from files: with 512 blocks stored meanwhile, in 45 ms instead
    of 11 for 256, the launch took 28 to 41 ms instead of 20.)"""

    min_looks: int = 512
    """Free blocks that the cleaner may look at in a step even if steps allocate few."""

    looks_during_loads: int = 128
    """The same in a step that waits for loads, whose planning took long enough."""

    clean_part: float = 3 / 4
    """Largest part of the device blocks that the cleaner keeps clean. What fits the
    rest is never stored."""

    clean_s: float = 0.25
    """Seconds of loads that the clean blocks are for. Hits take blocks that fast, and
    more clean blocks would only duplicate on the host what the device has. (2 MiB
    blocks at 50 GB/s: 12 GiB, six prefixes of 16,384 tokens of an 8B model.)"""

    clean_loads: float = 4.0
    """Times the blocks that one step took for loads lately that are kept clean. A copy
    of what the device still has takes the slot of what it has no longer: with 20 GiB of
    device and 40 GiB of host, as many clean blocks as `clean_s` allows took 10 GiB."""

    clean_batch: int = 16
    """Blocks that the cleaner stores beyond its window, so that not every step stores
    one: each copy takes a thread some time under the GIL, however small it is."""

    load_rate_decay: float = 0.999
    """Decay per step of the maximum of blocks that steps take for loads."""

    recheck_steps: int = 1000
    """Steps with enough clean blocks after which the cleaner counts them again, since
    hits take some, and the host may drop some."""

    alloc_rate_decay: float = 0.9
    """Decay per step of the maximum of blocks that steps allocate."""

    cost_weight: float = 0.2
    """Weight of the last measurement in measured costs."""

    faster_prefill_weight: float = 0.5
    """The same for prompts that were computed faster than known. The first ones of an
    engine are slow, as are disturbed ones. A cost that is too high would not be
    corrected, since blocks are then read from a slower store instead of computed."""

    assumed_prefill_s: float = 1e-4
    """Assumed seconds to compute a token, for secondary tiers, until a long prompt was
    computed: a slow GPU. Short prompts are not measured, and would wait for any
    store."""

    slow_join_weight: float = 0.05
    """Weight of launches that took longer than known. What sometimes delays a launch
    hides no load the next time."""

    shadow_slots: int = 1024
    """Least number of slots in the ghost caches of `store_from_use: "auto"`, if the
    host has as many. With fewer, chance decides."""

    uses_per_choice: int = 256
    """Sampled uses between choices."""

    choosy_gain: float = 1.1
    """Factor in hits that storing reused blocks only must gain. A change is costly,
    since blocks that were left out are missing."""

    choosy_hits: float = 16.0
    """Hits that are added to those of storing all blocks, since the first ones are
    chance."""

    hits_kept: float = 0.98
    """Part of the ghost caches' hits that counts at the next choice."""

    settled_outputs: int = 3
    """Outputs after which a step's stores will not turn out to be void: a rank reports
    a failed load with its step, or a step or two later. Only then are they written to
    secondary tiers."""

    plans_per_report: int = 16
    """With a pool, plans with stores for each report of the ranks that stores have
    ended: neighbours find blocks some steps later, and steps cost less."""

    stores_per_report: int = 256
    """Stores after which the report comes sooner: those of a long prompt."""

    claim_part: float = 1 / 256
    """With a pool, largest part of the slots that are withdrawn from neighbours ahead
    of their eviction, so that few steps do it. Their own engine still finds them."""

    settled_steps: int = 16
    """Steps after which the same holds regardless of outputs; more than any pipeline
    has in flight."""

    max_looks: int = 8_192
    """Most blocks of prompts that a step looks up for secondary tiers; one of an answer
    counts as two, and one to ask for as one more. Each takes about a microsecond, for
    which running requests wait. The next steps look up the rest."""

    looks_per_ask: int = 512
    """What a question to secondary tiers counts in addition."""

    answer_wait_s: float = 5e-3
    """Seconds that a step which runs nothing waits for answers. Local files and servers
    need less, for 1,024 blocks 4 ms. An empty step takes as long, and holds the GIL,
    which the asking thread needs."""

    fetch_part: float = 1 / 4
    """Part of the slots that may be being filled from secondary tiers."""

    max_fetches: int = 4096
    """Blocks that a step begins to fetch. Each takes about two microseconds; the rest
    follows with the next steps."""

    max_ended: int = 2048
    """Slots of jobs of secondary tiers whose end a step takes in. Each takes three
    microseconds or so, and a store that was slow may catch up at once."""

    first_fetch: int = 4
    """Blocks in the first job of a tier of unknown speed. It may be far slower than
    computing, and a request waits for the result. Fewer would not show what its threads
    do in parallel."""

    answer_patience_s: float = 0.02
    """Seconds for which a request that can compute meanwhile waits for answers. What
    they find can then be its hit, and the first step ends where it will be met."""

    meet_tokens: int = 256
    """Tokens that a step computes of a piece that is late, twice as many in each
    further step. Fewer would take a step about as long; more would be computed in
    vain."""

    meet_steps: float = 3.0
    """Steps with little to compute that meeting a fetch costs a request: less is not
    worth it. (H200, 4,096 tokens: such a step takes 10 ms of the CPU, all of the prompt
    takes 100.)"""

    fetch_job_s: float = 0.02
    """Least duration, in seconds, of jobs of a fast tier. Blocks of a job can be used
    only when all of them have arrived."""

    num_fetches: int = 5
    """Number of jobs whose median is a tier's time for a block. Single jobs may be
    slowed down by other reads or writes."""

    patience_s: float = 0.1
    """Seconds that a fetch may take even if computing would be faster: less is not
    worth a check."""

    remeasure_s: float = 10.0
    """Seconds for which a tier is avoided that is slower than computing, or does not
    deliver. Then a few blocks are read: a busy disk may be fast later."""

    retry_store_s: float = 30.0
    """The interval at which prefixes too short to gain by an answer are tried."""

    log_again_s: float = 300.0
    """Least seconds between log messages that a tier is slower than computing."""

    max_failed_loads: int = 3
    """Reports of failed loads, without a successful load between them, after which
    lookups skip the host for a while. Each makes all running requests start over."""

    retry_loads_s: float = 30.0
    """Seconds until the host is tried again. Doubled after each further failure."""

    max_retry_loads_s: float = 960.0
    """Upper limit of that time."""

    def last_settled(self, num_outputs: int, last_plan: int) -> int:
        """The last plan whose stores are final: no failed load of an earlier step can
        make them void any more.

        Args:
            num_outputs: Outputs of steps that the scheduler has taken.
            last_plan: The last plan that was sent.

        """
        return max(num_outputs - self.settled_outputs, last_plan - self.settled_steps)


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
