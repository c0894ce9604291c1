# SPDX-License-Identifier: Apache-2.0
"""The numbers of the scheduler's side, each with its reason.

None of them is a setting: users need not know them. Tests choose others, and the
simulator draws them at random, since no value may make an answer wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulingTuning:
    """Constants of promotion, prefetching, storing and the model of costs."""

    num_recent: int = 16
    """Blocks at the head of the free queue that are looked at for one that a step in
    flight may still use. Loads into such a block would wait for that step."""

    max_waits: int = 4
    """How often a request may wait for loads before it is admitted with them: those who
    overtake it may take its blocks again."""

    min_prefetch: int = 64
    """Prefetches of what cannot run yet are not worth a plan below so many blocks."""

    max_prefetch: int = 2048
    """Blocks that one plan prefetches for a request while others run. Each takes the
    scheduler some microseconds, which all others wait for; the rest comes with later
    plans, while these are on their way."""

    spare: float = 1 / 32
    """Part of the device blocks that prefetches leave to the requests that run: one
    that takes a prefetched block waits for its load."""

    claim_within_s: float = 1.0
    """Seconds that prefetched blocks are kept for the request that waits for them. It
    may have been aborted, which nobody tells the tier."""

    max_page_looks: int = 8_192
    """Device blocks that a step may look at for memory to give back, and take out for
    it: requests wait for it some milliseconds at most."""

    min_stores: int = 128
    """Blocks that the cleaner may store in a step even when steps take fewer."""

    idle_stores: int = 256
    """As above, in a step that runs nothing. A request that arrives waits for it."""

    idle_pause_s: float = 0.005
    """Seconds between two steps of an engine that runs nothing until device memory is
    given back. A request that arrives waits for it."""

    stores_beside_loads: int = 32
    """As above, in a step that waits for loads, or for what is read from a tier below:
    copies share the memory of the host, and take Python's lock from whoever launches
    the step that a request waits for. (16,384 tokens from files, in a timeline: 512
    blocks were stored meanwhile, in 45 ms instead of 11 for 256, and the launch took
    28 to 41 ms instead of 20.)"""

    min_looks: int = 512
    """Free blocks that the cleaner may look at in a step even when steps take few."""

    looks_beside_loads: int = 128
    """As above, in a step that waits for loads, whose planning took long enough."""

    clean_part: float = 3 / 4
    """Part of the device blocks that the cleaner keeps clean, at most. What fits the
    rest is never stored."""

    clean_s: float = 0.25
    """Nor does it keep more clean than the link loads in so many seconds: hits that
    come at once take blocks that fast, and what is clean lies on the host a second
    time, where it is in the way of what the device no longer has. (2 MiB blocks at 50
    GB/s: 12 GiB, six prefixes of 16,384 tokens of an 8B model.)"""

    look_anew_steps: int = 1000
    """After so many steps with enough clean blocks the cleaner looks at all of them
    anew: hits took some, and the host may have dropped some."""

    alloc_rate_decay: float = 0.9
    """What is left after a step of the largest number of blocks that steps took."""

    cost_weight: float = 0.2
    """How fast measured costs follow the last measurement."""

    faster_prefill_weight: float = 0.5
    """As above, for prompts that were computed faster than known: the first ones of an
    engine are slow, and so is what others disturb. What looks dear to compute is read
    from a store that takes longer, and is not computed again to be measured."""

    assumed_prefill_s: float = 1e-4
    """Seconds to compute a token, as far as tiers below are concerned, while no long
    prompt was computed: a slow GPU. Short ones are not measured, and would wait for a
    store however slow it is."""

    slow_join_weight: float = 0.05
    """As above, for launches that took longer than known: what holds up a launch now
    and then hides no load."""

    shadow_slots: int = 1024
    """Slots at least of the shadows in which `store_from_use: "auto"` tries both ways,
    if the host has as many: with fewer, chance decides."""

    uses_per_choice: int = 256
    """Sampled uses after which it chooses anew."""

    choosy_gain: float = 1.1
    """How many times as many hits it takes to leave out what was used once: a change
    has its cost, since nothing that was left out is there."""

    choosy_hits: float = 16.0
    """So many hits are taken for granted of storing all: the first few are chance."""

    hits_kept: float = 0.98
    """Part of a shadow's hits that still counts at the next choice."""

    settled_outputs: int = 3
    """When so many outputs more have come, nothing that a step stored turns out to be
    void: a rank tells of a failed load with its step, or a step or two later. It is not
    written below sooner."""

    settled_steps: int = 16
    """Nor after so many steps, which are more than any pipeline has in flight, whatever
    outputs have come."""

    max_asks: int = 16
    """Requests for which a step asks the tier below. Each has its keys made, and others
    wait meanwhile."""

    max_looks: int = 32_768
    """Blocks of prompts of which a step looks whether the tier below is to be asked for
    them, unless a single prompt has more: the requests that run wait for some
    milliseconds."""

    answer_wait_s: float = 5e-3
    """Seconds that a step which runs nothing waits for answers of tiers below: files
    and servers of the same machine give them in less, those for 1,024 blocks in 4 ms.
    An empty step takes as long, and keeps Python's lock from the thread that asks."""

    fetch_part: float = 1 / 4
    """Part of the slots that may be on their way from the tier below."""

    max_fetches: int = 4096
    """Blocks that a step begins to fetch. Each takes about two microseconds; the rest
    follows with the next steps."""

    max_ended: int = 2048
    """Slots of jobs of tiers below whose end a step takes in: each takes about three
    microseconds, and a store that was slow may catch up at once."""

    first_fetch: int = 4
    """Blocks of the first job of a tier whose speed is not known. A store may be far
    slower than computing, and who waits learns it from them; fewer would not show what
    its threads do beside one another."""

    fetch_job_s: float = 0.02
    """Seconds of a job of a tier that is so fast that its usual jobs take less: nobody
    can use any of its blocks before all of them are there."""

    num_fetches: int = 5
    """Jobs whose median says what a tier below takes for a block. Some of them are held
    up by what else is written or read, and their time is not that of the others."""

    patience_s: float = 0.1
    """Seconds that a request waits for a fetch although it takes longer than computing:
    less is not worth a look."""

    max_late_fetches: int = 3
    """Requests in a row that have waited for the tier below in vain, after which it is
    left alone for a while."""

    retry_store_s: float = 30.0
    """This while. What is too short to win is tried again after it, too."""

    remeasure_s: float = 10.0
    """One that is slower than computing is measured anew after so many seconds: a few
    blocks tell, and a disk that was busy may be fast."""

    tell_again_s: float = 300.0
    """How often the log may say that one is."""

    max_failed_loads: int = 3
    """Reports of failed loads, without a load that succeeded between them, after which
    lookups pass over the host for a while. Each of them has made every running request
    start over."""

    retry_loads_s: float = 30.0
    """Seconds until the host is asked again. Doubles each time that it fails again."""

    max_retry_loads_s: float = 960.0
    """But not beyond this."""
