# SPDX-License-Identifier: Apache-2.0
"""What the engines under test are asked to do.

Every workload starts from an empty prefix cache and asks for the same things on
every engine, so that its answers can be compared one by one. Prompts are token
ids; a follow-up prompt holds the engine's own answer, as in a conversation.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, hash_block_tokens
from vllm.v1.kv_tier.frontend import set_host_size

from ..names import get_hash_fn_by_name
from .engine import Answer, Engine
from .harm import host_memory
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


def _open_by_slot(wrapper: Any) -> None:
    """Let slots be opened and closed one by one, which are small here."""
    tier = wrapper.kv_tier
    num_slots, num_bytes = tier.buffer.slots.shape
    tier.buffer._open = [num_bytes] * num_slots
    tier.opener._piece_bytes = num_bytes


def _open_slots(wrapper: Any) -> tuple[int, bool]:
    """The slots that a rank has open, and whether others hold anything."""
    buffer = wrapper.kv_tier.buffer
    return buffer.num_open, bool(buffer.slots[buffer.num_open :].any())


@workload
def resized(engine: Engine) -> dict[str, Any]:
    """As `conversations`, while the host shrinks to a part and grows again."""
    slot_gib = engine.pool.slot_bytes / (1 << 30)
    num_slots = engine.pool.host.num_slots
    engine.on_ranks(_open_by_slot)
    told, sizes = [], []

    def note() -> None:
        (on_rank,) = engine.on_ranks(_open_slots)
        sizes.append((engine.pool.host.num_slots, *on_rank))

    def resize(turn: int) -> None:
        if turn:
            note()
            wanted = num_slots // 8 if turn == 1 else num_slots
            told.append(set_host_size(engine.llm, (wanted + 0.5) * slot_gib))

    answers = talk(engine, resize)
    note()
    refused = ""
    try:
        set_host_size(engine.llm, (num_slots + 2) * slot_gib)
    except ValueError as e:
        refused = str(e)
    facts = {"told": told, "sizes": sizes, "refused": refused}
    return {"answers": answers, "num_slots": num_slots, **facts}


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
def served_twice(engine: Engine) -> dict[str, Any]:
    """`served`, first computed, then from the host; and what the ranks have there."""
    answers = served(engine)["answers"] + served(engine)["answers"]
    return {"answers": answers, "ranks": engine.on_ranks(host_memory)}


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
