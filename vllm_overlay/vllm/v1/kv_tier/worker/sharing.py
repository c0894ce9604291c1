# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same KV have one memory for their host slots: which do, how they
get it at start, and who waits for whom.

Either all such ranks share it, or each has its own slots as if they held different KV.

Ranks with the same KV share slots. One of them, the owner, stores; all load. Each
publishes its progress in shared memory: for each kind of copy, the highest plan up to
which all have ended. So the fences of a plan hold across processes:

- a load of another rank waits for the owner's stores that fill its slots,
- a store of the owner waits for the loads of all others from its slots.

All waits are on the host, and only for what precedes in the order of the plans (within
a plan: stores, loads, then stores of what later plans overwrite). All ranks run plans
in that order, so waits cannot form a cycle. No wait takes longer than a copy may.
"""

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.engine import slot_bytes
from vllm.v1.kv_tier.memory.buffer import HostBuffer, shared_buffer
from vllm.v1.kv_tier.memory.numa import gpu_node
from vllm.v1.kv_tier.memory.opener import FIRST_BYTES
from vllm.v1.kv_tier.memory.regions import build_regions, flatten
from vllm.v1.kv_tier.memory.shared import Address, NotShared, SharedMemory
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.tuning import DEFAULT_TUNING, RankTuning
from vllm.v1.kv_tier.worker.slots import RankSlots

logger = init_logger(__name__)

Layout = tuple[int, ...]
"""Bytes of a block in each region of a rank."""

_PLAIN = {"FullAttentionSpec", "SlidingWindowSpec"}


def kv_replicas(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """How many consecutive ranks hold the same KV of every layer; 1 if none do.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.

    Returns:
        The number, or None if it depends on the heads of each layer, which
        `head_replicas` counts.

    """
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1 or _differing_ranks(vllm_config):
        return 1
    speculative = vllm_config.speculative_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    is_mla = vllm_config.model_config.use_mla
    replicas = releases.kv_replicas(kv_cache_config)
    if replicas is None and is_mla:
        # Layers of a draft model may be of another kind.
        replicas = num_ranks if speculative is None and _are_latent(specs) else 1
    if replicas is not None and (replicas > 1 or is_mla):
        return replicas if num_ranks % replicas == 0 else 1
    # Specs do not have the total number of heads. Each rank has at least one.
    kinds = {type(spec).__name__ for spec in specs}
    if not specs or not kinds <= _PLAIN:
        return 1
    return None if all(spec.num_kv_heads == 1 for spec in specs) else 1


def why_no_replicas(vllm_config: Any) -> str:
    """Why `kv_replicas` is 1, where several ranks have KV."""
    if reason := _differing_ranks(vllm_config):
        return reason
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return "pipeline stages hold KV of different layers"
    if not vllm_config.model_config.use_mla:
        return "no two ranks hold the same KV of every layer"
    is_drafted = vllm_config.speculative_config is not None
    others = "its draft model" if is_drafted else "its other layers"
    # Blocks of all layers alias the same memory, and a slot holds any of them.
    return (
        "ranks hold the same KV of the model's MLA layers, but not, as far as is "
        f"known, of {others}, and a host slot can be shared as a whole only"
    )


def _differing_ranks(vllm_config: Any) -> str | None:
    """Why each rank holds other KV, whatever the layers are; None if it need not."""
    parallel = vllm_config.parallel_config
    if (
        releases.decode_context_ranks(parallel) > 1
        or releases.prefill_context_ranks(parallel) > 1
    ):
        return "context parallel ranks hold KV of different tokens"
    speculative = vllm_config.speculative_config
    builder = None if speculative is None else speculative.draft_parallel_config
    num_ranks = parallel.tensor_parallel_size
    if builder is not None and builder.tensor_parallel_size != num_ranks:
        return "the draft model has another number of ranks than the model"
    return None


def _are_latent(specs: Sequence[Any]) -> bool:
    """Whether all layers use MLA, in releases without `kv_tp_replicas`."""
    # Older releases use one spec for MLA and full attention, with a flag.
    kinds = {type(spec).__name__ for spec in specs}
    known = kinds <= {"MLAAttentionSpec", "FullAttentionSpec"}
    return bool(specs) and known and all(map(releases.is_latent, specs))


def head_replicas(modules: Mapping[str, Any], layers: Iterable[str]) -> int:
    """On how many consecutive ranks all layers have the same KV heads.

    Args:
        modules: Modules of the model by name. Projections to queries, keys and values
            know their replicas.
        layers: Names of the layers with KV. A layer of unknown kind counts as not
            replicated.

    """
    found = 0
    projections = {
        name.rpartition(".")[0]: num
        for name, module in modules.items()
        if (num := releases.num_head_replicas(module)) is not None
    }
    for layer in layers:
        found = math.gcd(found, projections.get(layer.rpartition(".")[0], 1))
    return max(found, 1)


def obstacle(
    layouts: Sequence[Layout], replicas: int, is_one_machine: bool, has_below: bool
) -> str | None:
    """Why ranks with the same KV cannot share slots; None if they can.

    Args:
        layouts: Layout of each rank.
        replicas: Number of consecutive ranks that hold the same KV.
        is_one_machine: Whether all ranks are on this machine.
        has_below: Whether there are secondary tiers.

    """
    if not is_one_machine:
        return "they are on several machines"
    if has_below:
        return "each rank reads secondary tiers into its own slots"
    if not all(layouts):
        return "some ranks have no KV memory"
    if len(layouts) % replicas:
        return f"{len(layouts)} ranks do not divide into groups of {replicas}"
    if any(
        layouts[rank] != layouts[owner] for rank, owner in owners(layouts, replicas)
    ):
        return "their KV caches have different layouts"
    return None


def owners(ranks: Sequence[object], replicas: int) -> Iterator[tuple[int, int]]:
    """(rank, owner) for each rank: the owner stores for the ranks with the same KV.

    It is the first of them.
    """
    return ((rank, rank - rank % replicas) for rank in range(len(ranks)))


def held_once(per_rank: Sequence[int], replicas: int) -> int:
    """Bytes of a slot on all ranks together.

    Args:
        per_rank: Bytes of a block on each rank.
        replicas: Number of consecutive ranks that share a slot.

    """
    return sum(per_rank[::replicas])


@dataclass(frozen=True)
class SharedSlots:
    """Host slots that a rank shares with others."""

    buffer: HostBuffer
    memory: SharedMemory
    index: int
    """The rank's index among them. The first one stores."""


class RankFacts(NamedTuple):
    """What a rank reports about itself before ranks share."""

    layout: Layout
    node: int | None
    """NUMA node of its GPU."""
    head_replicas: int
    """Number of ranks with the same heads in every layer, if asked for."""


def may_share(
    executor: Any,
    num_blocks: int,
    replicas: int | None,
    is_one_machine: bool,
    has_below: bool,
) -> tuple[int, list[RankFacts]] | None:
    """Ask the ranks whether those that hold the same KV can share slots.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        replicas: Result of `kv_replicas`; None to ask the ranks.
        is_one_machine: Whether all ranks are on this machine.
        has_below: Whether there are secondary tiers.

    Returns:
        How many consecutive ranks hold the same KV, and the facts of each rank. None if
        none do, or if they cannot share; the log explains why.

    """
    asks = replicas is None
    facts = executor.collective_rpc(_facts, args=(num_blocks, asks))
    if replicas is None:
        replicas = math.gcd(*(each.head_replicas for each in facts))
    if replicas == 1:
        tell_no_effect("no two ranks hold the same heads in every layer")
        return None
    layouts = [each.layout for each in facts]
    reason = obstacle(layouts, replicas, is_one_machine, has_below)
    if reason is None:
        return replicas, facts
    _tell_why_not(replicas, reason)
    return None


def find_replicas(executor: Any, num_blocks: int, replicas: int | None) -> int:
    """How many consecutive ranks hold the same KV; 1 if none do.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        replicas: Result of `kv_replicas`; None to ask the ranks.

    """
    if replicas is None:
        facts = executor.collective_rpc(_facts, args=(num_blocks, True))
        replicas = math.gcd(*(each.head_replicas for each in facts))
    return replicas


def share_slots(
    executor: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    facts: Sequence[RankFacts],
) -> bool:
    """Let groups of ranks share the memory of their slots, with the first ones open.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        num_slots: Number of host slots.
        replicas: Number of consecutive ranks that hold the same KV.
        facts: From `may_share`.

    Returns:
        Whether they share. If not, everything is undone, and the log explains why.

    Raises:
        MemoryError: There is not enough host memory.

    """
    nodes = [
        {each.node for each in facts[owner : owner + replicas]} - {None}
        for _, owner in owners(facts, replicas)
    ]
    args = (num_blocks, num_slots, replicas, nodes)
    found = executor.collective_rpc(_create, args=args)
    if not (reasons := _reasons(found)):
        args = (num_blocks, num_slots, replicas, found)
        reasons = _reasons(executor.collective_rpc(_join, args=args))
    if not reasons:
        return True
    executor.collective_rpc(_drop_shared)
    _tell_why_not(replicas, reasons[0])
    return False


def _tell_why_not(replicas: int, reason: str) -> None:
    logger.info(
        "KV tier: %d ranks hold the same KV each, but every rank keeps a copy of its "
        "own on the host: %s.",
        replicas,
        reason,
    )


def tell_no_effect(reason: str) -> None:
    """Log why no ranks share slots although it was asked for."""
    logger.info(
        "KV tier: share_replicas has no effect, and every rank keeps host slots of its "
        "own: %s.",
        reason,
    )


def _reasons(found: Sequence[Any]) -> list[str]:
    return [each for each in found if isinstance(each, str)]


# These functions run on the ranks. `wrapper` is a WorkerWrapperBase.
def _facts(wrapper: Any, num_blocks: int, asks_heads: bool) -> RankFacts:
    runner = wrapper.worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    node = gpu_node(runner.device) if runner.device.type == "cuda" else None
    layout = tuple(region.block_bytes for region in regions)
    heads = _head_replicas(wrapper.worker) if asks_heads else 1
    return RankFacts(layout, node, heads)


def _head_replicas(worker: Any) -> int:
    layers = worker.vllm_config.compilation_config.static_forward_context
    with_kv = [
        name
        for name, layer in layers.items()
        if next(flatten(releases.kv_caches_of(layer)), None) is not None
    ]
    return head_replicas(dict(worker.get_model().named_modules()), with_kv)


def _create(
    wrapper: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    nodes: Sequence[set[int]],
) -> Address | str | None:
    """Create the memory on the ranks that store.

    Returns:
        Where the others find it, or why it could not be made; None on other ranks.

    """
    rank = wrapper.rpc_rank
    if rank % replicas:
        return None
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    try:
        memory = SharedMemory.create(num_slots, slot_bytes(regions), replicas)
        wrapper.kv_tier_shared = _slots(wrapper, memory, num_slots, 0, nodes[rank])
    except NotShared as e:
        return str(e)
    return memory.address


def _join(
    wrapper: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    addresses: Sequence[Address | None],
) -> str | None:
    """Map the memory on the other ranks. Returns the reason if that failed."""
    rank = wrapper.rpc_rank
    index = rank % replicas
    address = addresses[rank - index]
    if not index or address is None:
        return None
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    try:
        memory = SharedMemory.join(address, num_slots, slot_bytes(regions), replicas)
        wrapper.kv_tier_shared = _slots(wrapper, memory, num_slots, index, None)
    except NotShared as e:
        return str(e)
    return None


def _slots(
    wrapper: Any,
    memory: SharedMemory,
    num_slots: int,
    index: int,
    nodes: set[int] | None,
) -> SharedSlots:
    device: torch.device = wrapper.worker.model_runner.device
    buffer = shared_buffer(memory, num_slots, device, nodes, FIRST_BYTES)
    return SharedSlots(buffer, memory, index)


def _drop_shared(wrapper: Any) -> None:
    """Undo sharing on this rank."""
    taken = take_shared(wrapper)
    if taken is not None:
        taken.memory.close()


def take_shared(wrapper: Any) -> SharedSlots | None:
    """Take the shared slots of this rank, if any. Later calls return None."""
    return vars(wrapper).pop("kv_tier_shared", None)


KINDS = ("store", "clean", "load", "load_ahead")
"""Kinds of copies; columns of the board."""

_STORE, _CLEAN, _LOAD, _AHEAD = range(len(KINDS))
# The next column is 1 once the rank has stopped copying. It is set before copies are
# dropped and read after the others, so that dropped copies do not count as done.
_LEFT = len(KINDS)
_OWNER = 0


class PeerLost(RuntimeError):
    """Copies of another rank will not come, or may not have ended."""


class Ends(Protocol):
    """A copy."""

    def has_come(self) -> bool:
        """Whether it has ended."""


class Peers:
    """One of the ranks that share slots.

    Args:
        memory: Shared memory. Row i of its board belongs to the i-th rank.
        index: This rank's index among them. The first one is the owner.
        slots: Slots of this rank. A store counts as ended when its checksums exist too.
        tuning: Timeouts and intervals.

    """

    def __init__(
        self,
        memory: SharedMemory,
        index: int,
        slots: RankSlots | None = None,
        tuning: RankTuning = DEFAULT_TUNING,
    ) -> None:
        self.is_owner = index == _OWNER
        """Whether this rank stores."""
        self.is_lost = False
        """Whether a wait timed out: this rank must stop copying."""
        self._memory = memory
        self._board = memory.board
        self._index = index
        self._slots = slots
        self._tuning = tuning
        self._watch: _Watch | None = None

    # ------------------------------------------------------------------ waiting

    def wait_for_stores(self, plan: StepPlan) -> None:
        """Wait for the stores up to the fence of `plan`, before slots are loaded.

        Raises:
            PeerLost: They did not end, and will not.

        """
        seq = plan.load_after_stores
        if self.is_owner or not seq:
            return
        # The fence does not cover what the plan itself stores for later ones.
        ends = {_STORE: seq, _CLEAN: min(seq, plan.seq - 1)}
        self._wait(_OWNER, ends, "stores for this one")
        if self._has_left(_OWNER):
            # Copies that it had queued may have been dropped.
            raise PeerLost("The rank that stores for this one has stopped copying.")

    def wait_for_loads(self, seq: int) -> None:
        """Wait for other ranks' loads up to plan `seq`, before slots are overwritten.

        Raises:
            PeerLost: The loads do not end, or the rank has stopped copying.

        """
        if not self.is_owner or not seq:
            return
        for index in range(1, len(self._board)):
            self._wait(index, {_LOAD: seq, _AHEAD: seq}, "loads from the same slots")

    def _wait(self, index: int, ends: Mapping[int, int], what: str) -> None:
        row = self._board[index]
        limit = time.monotonic() + self._tuning.limit_s
        look_s = self._tuning.peer_look_s
        while True:
            has_left = self._has_left(index)
            if all(row[kind] >= seq for kind, seq in ends.items()):
                return
            if has_left:
                raise PeerLost(f"The rank that {what} has stopped copying.")
            if self.is_lost or time.monotonic() > limit:
                self.is_lost = True
                raise PeerLost(
                    f"The rank that {what} has not come so far in "
                    f"{self._tuning.limit_s:g} s. This rank stops copying."
                )
            time.sleep(look_s)
            # Long waits are polled less often, see `fence_look_s`.
            look_s = min(2 * look_s, self._tuning.fence_look_s)

    def _has_left(self, index: int) -> bool:
        return bool(self._board[index, _LEFT])

    # ------------------------------------------------------------------ telling

    def publish_end(self, kind: str, seq: int) -> None:
        """Publish that all copies of `kind` up to plan `seq` have ended."""
        self._publish(KINDS.index(kind), seq)

    def watch(
        self, plan: StepPlan, jobs: Mapping[str, Ends | None], device: torch.device
    ) -> None:
        """Watch the queued copies of `plan`, and publish when they end.

        Args:
            plan: The next plan.
            jobs: Its copies by kind; None or missing if there are none.
            device: Device of the copies.

        """
        if self._watch is None:
            self._watch = _Watch(self._publish, self.leave, device, self._tuning)
            weakref.finalize(self, self._watch.end)
        slots = {"store": plan.store_slots, "clean": plan.clean_slots}
        for column, kind in enumerate(KINDS):
            job = jobs.get(kind)
            has_come = None
            if job is not None:
                has_come = _whole(job, self._slots, slots.get(kind, ()))
            self._watch.watch(column, plan.seq, has_come)

    def leave(self) -> None:
        """Publish that this rank has stopped copying, so that others do not wait."""
        self._board[self._index, _LEFT] = 1

    def _publish(self, column: int, seq: int) -> None:
        self._board[self._index, column] = seq


def _whole(
    job: Ends, of_rank: RankSlots | None, slots: Sequence[int]
) -> Callable[[], bool]:
    """A test whether a copy has ended and the checksums of its slots exist."""
    if of_rank is None or of_rank.checksums is None or not slots:
        return job.has_come
    return lambda: job.has_come() and of_rank.are_checked(slots)


class _Watch:
    """A thread that polls for the ends of copies while any are in flight."""

    def __init__(
        self,
        tell: Callable[[int, int], None],
        fail: Callable[[], None],
        device: torch.device,
        tuning: RankTuning,
    ) -> None:
        self._publish = weakref.WeakMethod(tell)
        self._fail = weakref.WeakMethod(fail)
        self._device = device
        self._look_s = tuning.fence_look_s
        self._lock = threading.Lock()
        # By column: copies in flight, oldest first, and the last plan that began.
        self._under_way = [deque[tuple[int, Callable[[], bool]]]() for _ in KINDS]
        self._last = [0 for _ in KINDS]
        # Whether the thread polls or sleeps; `_is_over` ends it.
        self._looks = self._is_over = False
        self._wake = queue.SimpleQueue[bool]()
        threading.Thread(target=self._run, name="kv-tier-peers", daemon=True).start()

    def watch(self, column: int, seq: int, has_come: Callable[[], bool] | None) -> None:
        with self._lock:
            self._last[column] = seq
            if has_come is not None:
                self._under_way[column].append((seq, has_come))
                if not self._looks:
                    self._looks = True
                    self._wake.put(True)
            elif not self._under_way[column]:
                self._call(self._publish, column, seq)

    def end(self) -> None:
        self._is_over = True
        self._wake.put(False)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._wake.get():
                while self._look() and not self._is_over:
                    time.sleep(self._look_s)
        except Exception:
            # The device failed. Waiting ranks must not take unfinished copies for done.
            logger.exception("KV tier: the ends of copies cannot be seen.")
            self._call(self._fail)

    def _look(self) -> bool:
        """Publish which copies have ended. Returns whether to poll again."""
        with self._lock:
            for column, jobs in enumerate(self._under_way):
                if not jobs:
                    continue
                while jobs and jobs[0][1]():
                    jobs.popleft()
                ended = jobs[0][0] - 1 if jobs else self._last[column]
                self._call(self._publish, column, ended)
            self._looks = any(self._under_way)
            return self._looks

    @staticmethod
    def _call(method: weakref.WeakMethod, *args: int) -> None:
        if (bound := method()) is not None:
            bound(*args)
