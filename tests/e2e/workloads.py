# SPDX-License-Identifier: Apache-2.0
"""What the engines under test are asked to do.

Every workload starts from an empty prefix cache and asks for the same things on
every engine, so that its answers can be compared one by one. Prompts are token
ids; a follow-up prompt holds the engine's own answer, as in a conversation.
"""

import logging
import random
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm.v1.core.kv_cache_utils import get_block_hash, hash_block_tokens

from ..names import get_hash_fn_by_name
from .engine import Answer, Engine
from .jobs import SMALL
from .model import VOCAB_SIZE, make_lora

BLOCK = 32
"""Tokens in a KV block."""

Workload = Callable[[Engine], dict[str, Any]]
WORKLOADS: dict[str, Workload] = {}


def workload(function: Workload) -> Workload:
    WORKLOADS[function.__name__] = function
    return function


def text(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def fill_device(engine: Engine, seed: int = 900) -> None:
    """Push everything else out of a small device cache."""
    for i in range(4):
        engine.generate([text(seed + i, 11 * BLOCK)], max_tokens=1)


def talk(
    engine: Engine,
    between_turns: Callable[[int], None] = lambda turn: None,
    num_turns: int = 3,
) -> list[Answer]:
    """Six conversations whose KV is about twice the small device cache."""
    prompts = [text(i, 100 + 7 * i) for i in range(6)]
    answers: list[Answer] = []
    for turn in range(num_turns):
        between_turns(turn)
        # The last turn comes all at once, the others one by one.
        if turn == num_turns - 1:
            found = engine.generate(prompts, max_tokens=16)
        else:
            found = [engine.generate([p], max_tokens=16)[0] for p in prompts]
        answers += found
        for i, answer in enumerate(found):
            prompts[i] = prompts[i] + answer["tokens"] + text(100 * turn + i, 40)
    return answers


@workload
def conversations(engine: Engine) -> dict[str, Any]:
    return {"answers": talk(engine)}


@workload
def overcommit(engine: Engine) -> dict[str, Any]:
    """Six requests that together grow to twice the small device cache."""
    prompts = [text(200 + i, 90 + 5 * i) for i in range(6)]
    return {"answers": engine.generate(prompts, max_tokens=130)}


@workload
def shared_prefix(engine: Engine) -> dict[str, Any]:
    """Many requests find the same evicted prefix in the same step."""
    head = text(300, 5 * BLOCK)
    answers = engine.generate([head + text(301, 10)], max_tokens=4)
    fill_device(engine)
    prompts = [head + text(310 + i, 20) for i in range(6)]
    return {"answers": answers + engine.generate(prompts, max_tokens=12)}


SERVED = [text(i, 5 * BLOCK + 1) for i in range(8)]
"""Prompts that servers are asked too; more than the small device cache holds."""


@workload
def served(engine: Engine) -> dict[str, Any]:
    """What servers are asked, one by one."""
    answers = [engine.generate([p], max_tokens=8)[0] for p in SERVED]
    return {"answers": answers}


@workload
def sampling(engine: Engine) -> dict[str, Any]:
    """n=3 with a seed, first computed, then from the cache.

    For engines that never split these prompts: on CPUs, upstream's model runner
    V1 cannot sample with a seed behind a partial prefill.
    """
    prompts = [text(400 + i, 4 * BLOCK + 9) for i in range(3)]
    params = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 20}
    answers = engine.generate(prompts, **params)
    fill_device(engine)
    return {"answers": answers + engine.generate(prompts, **params)}


@workload
def salts(engine: Engine) -> dict[str, Any]:
    """A prompt is found again under its own salt only."""
    prompt = text(500, 5 * BLOCK + 1)
    answers = []
    for salt, evict in [
        ("a", False),
        ("a", False),
        ("b", False),
        ("a", True),
        ("b", True),
        ("c", True),
        (None, True),
    ]:
        if evict:
            fill_device(engine)
        answers += engine.generate([prompt], salt=salt, max_tokens=8)
    return {"answers": answers}


@workload
def prompt_logprobs(engine: Engine) -> dict[str, Any]:
    """A request for prompt logprobs computes its prompt, cached or not."""
    prompt = text(600, 5 * BLOCK + 3)
    answers = engine.generate([prompt], max_tokens=4)
    fill_device(engine)
    answers += engine.generate([prompt], max_tokens=4, prompt_logprobs=5)
    answers += engine.generate([prompt], max_tokens=4)
    return {"answers": answers}


@workload
def aborts(engine: Engine) -> dict[str, Any]:
    """Requests die at every stage of their life; the others notice nothing."""
    prompts = [text(700 + i, 120 + 9 * i) for i in range(6)]
    answers = []
    for num_steps in (1, 2, 3, 5, 8, 30):
        answers += engine.generate_with_aborts(
            prompts, victims=[1, 3, 4], after_steps=num_steps, max_tokens=24
        )
    answers += engine.generate(prompts, max_tokens=24)
    return {"answers": answers}


@workload
def reset(engine: Engine) -> dict[str, Any]:
    """After a reset neither tier has anything."""
    prompts = [text(800 + i, 5 * BLOCK + 5) for i in range(6)]
    answers = [engine.generate([p], max_tokens=8)[0] for p in prompts]
    was_reset = engine.reset()
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    return {"answers": answers, "was_reset": was_reset}


@workload
def reset_while_running(engine: Engine) -> dict[str, Any]:
    """A reset is refused while requests run, and harms none."""
    prompts = [text(850 + i, 4 * BLOCK + 5) for i in range(6)]
    engine.start(prompts, max_tokens=12)
    engine.steps(3)
    was_reset = engine.reset()
    answers = engine.finish()
    return {"answers": answers, "was_reset": was_reset}


@workload
def loras(engine: Engine) -> dict[str, Any]:
    """A prompt is found again under its own adapter only."""
    prompt = text(870, 5 * BLOCK + 1)
    with scratch_folder() as folder:
        a, b = (make_lora(folder / n, seed) for n, seed in [("a", 1), ("b", 2)])
        answers = []
        for lora in (a, b, None):
            answers += engine.generate([prompt], lora=lora, max_tokens=8)
        for i, lora in enumerate((a, b, None)):
            fill_device(engine, seed=900 + 10 * i)
            answers += engine.generate([prompt], lora=lora, max_tokens=8)
    return {"answers": answers}


@workload
def tenants(engine: Engine) -> dict[str, Any]:
    """A prompt whose KV is on the host only, asked for by everybody but its owner,
    then by its owner."""
    prompt = text(880, 5 * BLOCK + 1)
    with tempfile.TemporaryDirectory() as folder:
        a, b = (make_lora(Path(folder, n), seed) for n, seed in [("a", 1), ("b", 2)])
        everybody: dict[str, dict[str, Any]] = {
            "nobody": {},
            "salt s": {"salt": "s"},
            "salt s and a blank": {"salt": "s "},
            # The name of an adapter (upstream #44701).
            "salt a": {"salt": "a"},
            "adapter a": {"lora": a},
            "adapter b": {"lora": b},
            "adapter a, salt s": {"lora": a, "salt": "s"},
            "adapter b, salt s": {"lora": b, "salt": "s"},
        }
        rounds = []
        for owner in everybody:
            assert engine.reset()
            answers = {}
            (first,) = engine.generate([prompt], max_tokens=8, **everybody[owner])
            fill_device(engine)
            for name, tenant in everybody.items():
                if name != owner:
                    (answers[name],) = engine.generate([prompt], max_tokens=8, **tenant)
            fill_device(engine, seed=950)
            (again,) = engine.generate([prompt], max_tokens=8, **everybody[owner])
            rounds.append(
                {"owner": owner, "first": first, "others": answers, "again": again}
            )
    return {"rounds": rounds}


@workload
def hash_algorithm(engine: Engine) -> dict[str, Any]:
    """By algorithm, how many keys of a prompt's blocks the host has."""
    prompt = text(890, 3 * BLOCK + 1)
    engine.generate([prompt], max_tokens=1)
    fill_device(engine)
    keys = {get_block_hash(key) for slot in engine.slots() for key in slot.keys}
    found = {}
    for name in ("sha256", "sha256_cbor"):
        algorithm, parent, hashes = get_hash_fn_by_name(name), None, set()
        for start in range(0, 3 * BLOCK, BLOCK):
            tokens = prompt[start : start + BLOCK]
            parent = hash_block_tokens(algorithm, parent, tokens)
            hashes.add(parent)
        found[name] = len(hashes & keys)
    return {"found": found}


@workload
def handed_over(engine: Engine) -> dict[str, Any]:
    """Prompts whose KV a connector saves and loads again, with turns in between.

    For engines with a KV connector; on others a cache serves them.
    """
    # Not at a block's end: upstream's example connector subtracts the wrong way there.
    prompts = [text(950 + i, 4 * BLOCK + 9) for i in range(8)]
    answers = [engine.generate([p], max_tokens=8)[0] for p in prompts]
    # Found in the tier, and saved with what follows.
    prompts = [p + text(960 + i, 50) for i, p in enumerate(prompts)]
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    let_transfers_end(engine)
    was_reset = engine.reset()
    # Neither tier has anything: it comes from the connector.
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    external = engine.counters().get("external_prefix_cache_hits", 0)
    # Evicted since, so it comes from the host.
    prompts = [p + text(970 + i, 40) for i, p in enumerate(prompts)]
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    # All at once, with others whose prefix only the connector may have.
    answers += engine.generate([p + text(980, 20) for p in prompts[:4]], max_tokens=40)
    let_transfers_end(engine)
    changed = engine.on_ranks(changed_while_sent)
    return {
        "answers": answers,
        "was_reset": was_reset,
        "external": external,
        "changed": changed,
    }


def let_transfers_end(engine: Engine) -> None:
    """Some steps with less than a block: a connector has nothing to send of it."""
    engine.generate([text(999, 5)], max_tokens=12)


def changed_while_sent(wrapper: Any) -> list[str]:
    from .connectors import CHANGED

    return CHANGED


@workload
def connector_spoils(engine: Engine) -> dict[str, Any]:
    """What the connector loads is wrong from now on. Asks what `handed_over` asks."""
    engine.on_ranks(spoil_external)
    return handed_over(engine)


def spoil_external(wrapper: Any) -> None:
    """Let every block that is loaded from a file be another one's."""
    import safetensors.torch

    for module, name in ((torch, "load"), (safetensors.torch, "load_file")):
        original = getattr(module, name)

        def load(path: Any, real: Any = original, **more: Any) -> Any:
            found = real(path, **more)
            if isinstance(found, list):
                return [data.roll(len(data) // 3 // 8 * 8) for data in found]
            return {key: data.roll(1, 0) for key, data in found.items()}

        setattr(module, name, load)


@workload
def external_load_fails(engine: Engine) -> dict[str, Any]:
    """Some blocks do not come. Asks what `handed_over` asks."""
    engine.on_ranks(fail_external_loads, 3)
    return handed_over(engine)


def fail_external_loads(wrapper: Any, number: int) -> None:
    from .connectors import SlowConnector

    SlowConnector.fail_loads = number


@workload
def tier_load_fails_beside_a_connector(engine: Engine) -> dict[str, Any]:
    """A load of the tier fails while the connector loads what follows it."""
    if engine.has_tier:
        engine.on_ranks(break_copy, "loads", 0)
    head, tail = text(990, 3 * BLOCK), text(991, 3 * BLOCK)
    answers = engine.generate([head + tail + text(992, 9)], max_tokens=4)
    let_transfers_end(engine)
    assert engine.reset()
    # Without a connector that knows it, from then on: the tier has the head only.
    answers += engine.generate([head + text(993, 9)], max_tokens=4)
    fill_device(engine)
    answers += engine.generate([head + tail + text(994, 20)], max_tokens=30)
    let_transfers_end(engine)
    failures = engine.on_ranks(mend_copy, "loads") if engine.has_tier else []
    return {"answers": answers, "failures": failures}


def embed(
    engine: Engine, before_round: Callable[[int], None] = lambda number: None
) -> dict[str, Any]:
    """Prompts about twice the small device cache, then the same with more behind."""
    vectors, cached_tokens = [], []
    for number in range(2):
        before_round(number)
        for i in range(8):
            prompt = text(i, 6 * BLOCK + 5) + number * text(100 + i, 40)
            vector, cached = engine.embed(prompt)
            vectors.append(vector)
            cached_tokens.append(cached)
    return {"vectors": vectors, "cached_tokens": cached_tokens}


@workload
def embeddings(engine: Engine) -> dict[str, Any]:
    return embed(engine)


# What follows does harm to the host tier, and runs only where there is one.


@workload
def corrupt_slot(engine: Engine) -> dict[str, Any]:
    """One byte row of one host slot is wrong when a conversation needs it.

    Asks what `conversations` asks.
    """
    victim: list[int] = []
    reads: list[int] = []

    def between_turns(turn: int) -> None:
        if turn == 1:
            fill_device(engine)
            victim.append(engine.oldest_slot())
            engine.on_ranks(spoil_slot, victim[0])
            reads.append(engine.on_ranks(count_reads, victim[0])[0])

    answers = talk(engine, between_turns)
    (reads_after,) = set(engine.on_ranks(count_reads, victim[0]))
    return {"answers": answers, "reads": reads_after - reads[0]}


@workload
def nan_slot(engine: Engine) -> dict[str, Any]:
    """As `corrupt_slot`, with a slot full of NaNs, which `verify` must refuse: a load
    would leave them in a device block."""

    def between_turns(turn: int) -> None:
        if turn == 1:
            fill_device(engine)
            engine.on_ranks(fill_with_nans, engine.oldest_slot())

    with refused_loads(engine) as found:
        answers = talk(engine, between_turns)
    return {"answers": answers, **found}


@workload
def corrupt_slot_refused(engine: Engine) -> dict[str, Any]:
    """`corrupt_slot`, and what became of its loads."""
    with refused_loads(engine) as found:
        result = corrupt_slot(engine)
    return {**result, **found}


@contextmanager
def refused_loads(engine: Engine) -> Iterator[dict[str, Any]]:
    """Number of reports of failed loads that reach the scheduler meanwhile, and what
    a rank in this process logs of them."""
    found: dict[str, Any] = {"failed_loads": 0, "log": []}
    apply_report = engine.pool.apply_report

    def count(report: Any) -> int | None:
        void_plan = apply_report(report)
        found["failed_loads"] += void_plan is not None
        return void_plan

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found["log"].append(self.format(record))

    handler = Keep()
    logger = logging.getLogger("vllm.v1.kv_tier.worker")
    logger.addHandler(handler)
    engine.pool.apply_report = count
    try:
        yield found
    finally:
        del engine.pool.apply_report
        logger.removeHandler(handler)


@workload
def corrupt_each_group(engine: Engine) -> dict[str, Any]:
    """One slot is wrong when it is loaded, of each KV cache group in turn.

    Asks for each what `conversations` asks.
    """
    results: list[dict[str, Any]] = []
    for group, spec in enumerate(engine.groups):
        assert engine.reset()

        def between_turns(turn: int, group: int = group) -> None:
            if turn == 1:
                engine.on_ranks(spoil_first_load, engine.slots_of(group))

        answers = talk(engine, between_turns)
        spoilt = engine.on_ranks(stop_spoiling)
        results.append({"group": spec, "answers": answers, "spoilt": spoilt})
    return {"groups": results}


@workload
def corrupt_each_rank(engine: Engine) -> dict[str, Any]:
    """One slot is wrong on one rank when it is loaded, on each rank in turn.

    Asks for each what `conversations` asks.
    """
    results: list[dict[str, Any]] = []
    for rank in range(engine.facts["world_size"]):
        assert engine.reset()

        def between_turns(turn: int, rank: int = rank) -> None:
            if turn == 1:
                engine.on_ranks(spoil_first_load, engine.slots_of(group=0), rank)

        answers = talk(engine, between_turns)
        spoilt = engine.on_ranks(stop_spoiling)
        results.append({"answers": answers, "spoilt": spoilt})
    return {"ranks": results}


@workload
def corrupt_embeddings(engine: Engine) -> dict[str, Any]:
    """One slot is wrong when it is loaded. Asks what `embeddings` asks."""

    def before_round(number: int) -> None:
        if number == 1:
            engine.on_ranks(spoil_first_load, engine.slots_of(group=0))

    result = embed(engine, before_round)
    return {**result, "spoilt": engine.on_ranks(stop_spoiling)}


@workload
def load_fails(engine: Engine) -> dict[str, Any]:
    """One load fails on the last rank. Asks what `conversations` asks."""
    engine.on_ranks(break_copy, "loads", 2)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def load_fails_in_a_crowd(engine: Engine) -> dict[str, Any]:
    """One load fails while other requests run. Asks what `overcommit` asks."""
    engine.on_ranks(break_copy, "loads", 0)
    answers = overcommit(engine)["answers"]
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def store_report_is_lost(engine: Engine) -> dict[str, Any]:
    """One store fails, and the scheduler never hears of it. Asks what `conversations`
    asks."""
    engine.on_ranks(break_copy, "stores", 3)
    engine.on_ranks(lose_store_reports)
    answers = talk(engine)
    engine.on_ranks(lose_no_reports)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def flood(engine: Engine) -> dict[str, Any]:
    """Requests for twenty times the small device cache at once, twice."""
    prompts = [text(1000 + i, 9 * BLOCK + 3 * i % 60) for i in range(24)]
    answers = engine.generate(prompts, max_tokens=30)
    prompts = [p + a["tokens"] + text(1100, 40) for p, a in zip(prompts, answers)]
    prompts += [text(1200 + i, 9 * BLOCK + 5) for i in range(24)]
    answers += engine.generate(prompts, max_tokens=30)
    return {"answers": answers, "blocks": blocks_of(prompts, 30), **at_rest(engine)}


@workload
def thousand_aborts(engine: Engine) -> dict[str, Any]:
    """A thousand requests end in one step, the first of them in the middle."""
    prompts = [text(1300 + i, 120 + i % 40) for i in range(1010)]
    victims = [i for i in range(1010) if i % 101]
    answers = engine.generate_with_aborts(
        prompts, victims=victims, after_steps=4, max_tokens=12
    )
    answers += engine.generate(prompts[1:4], max_tokens=12)
    return {"answers": answers, "aborted": len(victims), **at_rest(engine)}


def blocks_of(prompts: list[list[int]], max_tokens: int) -> int:
    return sum((len(prompt) + max_tokens) // BLOCK for prompt in prompts)


def at_rest(engine: Engine) -> dict[str, Any]:
    """What must be as before when nothing runs."""
    pool = engine.pool
    return {
        "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "below_zero": [name for name, v in engine.counters().items() if v < 0],
    }


@workload
def store_fails(engine: Engine) -> dict[str, Any]:
    """One store fails on the last rank. Asks what `conversations` asks."""
    engine.on_ranks(break_copy, "stores", 3)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def load_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """As `load_fails`. With a pipeline, this rank's outputs go to no scheduler."""
    engine.on_ranks(break_copy, "loads", 2, 0)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "loads")}


@workload
def store_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """As `store_fails`."""
    engine.on_ranks(break_copy, "stores", 3, 0)
    answers = talk(engine)
    return {"answers": answers, "failures": engine.on_ranks(mend_copy, "stores")}


@workload
def embeddings_load_fails_on_the_first_rank(engine: Engine) -> dict[str, Any]:
    """One load fails on the first rank. Asks what `embeddings` asks."""
    engine.on_ranks(break_copy, "loads", 2, 0)
    return {**embed(engine), "failures": engine.on_ranks(mend_copy, "loads")}


# These run on the ranks. `wrapper` is a WorkerWrapperBase with a HostTier.


def spoil_slot(wrapper: Any, index: int) -> None:
    """Move the bytes of a slot, whole numbers at a time.

    Anything else can make NaNs, which would stay in the device block and harm
    whoever has it next.
    """
    slots = wrapper.kv_tier.buffer.slots
    slots[index].copy_(slots[index].roll(slots.shape[1] // 3 // 8 * 8))


def fill_with_nans(wrapper: Any, index: int) -> None:
    wrapper.kv_tier.buffer.slots[index].fill_(0xFF)


def spoil_first_load(
    wrapper: Any, among: Container[int], rank: int | None = None
) -> None:
    """Spoil the first slot of `among` that is loaded, before it is.

    On one rank, if it is given, else on all.
    """
    if rank not in (None, wrapper.worker.rank):
        return
    wrapper.spoilt = []
    for engine in copiers(wrapper, "loads"):

        def loads(slots: Any, blocks: Any, real: Any = engine.loads) -> Any:
            if not wrapper.spoilt:
                wrapper.spoilt = [slot for slot in slots if slot in among][:1]
                for slot in wrapper.spoilt:
                    spoil_slot(wrapper, slot)
            return real(slots, blocks)

        engine.loads = loads


def stop_spoiling(wrapper: Any) -> int:
    """Undo `spoil_first_load`; how many slots were spoilt."""
    for engine in copiers(wrapper, "loads"):
        engine.__dict__.pop("loads", None)
    return len(wrapper.__dict__.pop("spoilt", []))


def copiers(wrapper: Any, name: str) -> list[Any]:
    """The copy engines whose method `name` (`loads` or `stores`) is in use."""
    engines = wrapper.kv_tier.engines
    return [engines.stores] if name == "stores" else [engines.step_loads, engines.loads]


def count_reads(wrapper: Any, index: int) -> int:
    """How often `index` was loaded since the first call."""
    if not hasattr(wrapper, "reads"):
        wrapper.reads = []
        for engine in copiers(wrapper, "loads"):

            def loads(slots: Any, blocks: Any, real: Any = engine.loads) -> Any:
                wrapper.reads += slots
                return real(slots, blocks)

            engine.loads = loads
    return wrapper.reads.count(index)


def break_copy(wrapper: Any, name: str, skip: int, rank: int = -1) -> None:
    """Let one of the `stores` or `loads` of a rank fail, after `skip` good ones.

    Ranks count from the last one where `rank` is negative.
    """
    if wrapper.worker.rank != rank % wrapper.vllm_config.parallel_config.world_size:
        return
    wrapper.failures = 0
    left = skip
    for engine in copiers(wrapper, name):
        real = getattr(engine, name)

        def failing(
            sources: Any, targets: Any, engine: Any = engine, real: Any = real
        ) -> Any:
            nonlocal left
            left -= 1
            if left >= 0 or wrapper.failures:
                return real(sources, targets)
            wrapper.failures += 1
            # It leaves wrong bytes: those of the neighbours.
            transfer = real([(source + 1) % SMALL for source in sources], targets)
            transfer.copy(range(len(engine.regions)))
            raise RuntimeError("a copy fails for the test")

        setattr(engine, name, failing)


def lose_store_reports(wrapper: Any) -> None:
    """Drop what the next outputs say of stores that failed."""
    tier = wrapper.kv_tier
    real = tier.attach_report

    def attach_report(output: Any) -> Any:
        if tier._report is not None:
            tier._report.failed_store_slots.clear()
        return real(output)

    tier.attach_report = attach_report


def lose_no_reports(wrapper: Any) -> None:
    del wrapper.kv_tier.attach_report


def mend_copy(wrapper: Any, name: str) -> int:
    """Undo `break_copy`; how many copies failed."""
    for engine in copiers(wrapper, name):
        engine.__dict__.pop(name, None)
    return wrapper.__dict__.pop("failures", 0)
