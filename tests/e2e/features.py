# SPDX-License-Identifier: Apache-2.0
"""Workloads for what an engine can do beside answering prompts.

Each brings prefixes back after something pushed them off a small device cache, or
after something that must leave nothing of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads

from .engine import Answer, Engine
from .harm import spoil_first_load, stop_spoiling
from .kinds import IMAGE_SIZE
from .model import make_llama, make_lora
from .release import lacking
from .workloads import BLOCK, WORKLOADS, fill_device, scratch_folder, text, workload

try:
    from vllm.sampling_params import StructuredOutputsParams

    STRUCTURED = "structured_outputs"
except ImportError:
    from vllm.sampling_params import (  # type: ignore[attr-defined, no-redef]
        GuidedDecodingParams as StructuredOutputsParams,
    )

    STRUCTURED = "guided_decoding"

SERVED = ["by_priority", "structured", "beams", "paused"]
"""Those whose answers come from the host in part."""


def ask_one_by_one(
    engine: Engine, prompts: Sequence[list[int]], **params: Any
) -> list[Answer]:
    return [engine.generate([p], **{"max_tokens": 8, **params})[0] for p in prompts]


@workload
def by_priority(engine: Engine) -> dict[str, Any]:
    """Requests in the middle of their answers give way to more important ones.

    Together they need more than the small device cache.
    """
    prompts = [text(1000 + i, 150 + 5 * i) for i in range(6)]
    for i, prompt in enumerate(prompts[:3]):
        engine.start([prompt], priority=9 - i, max_tokens=50)
    engine.steps(8)
    for prompt in prompts[3:]:
        engine.start([prompt], priority=1, max_tokens=50)
    return {"answers": engine.finish()}


@workload
def structured(engine: Engine) -> dict[str, Any]:
    """Answers that a grammar restricts to the tokens 3 to 9."""
    prompts = [text(1100 + i, 4 * BLOCK + 9) for i in range(3)]
    params = {
        STRUCTURED: StructuredOutputsParams(regex="(t[3-9]){40}"),
        "max_tokens": 10,
    }
    answers = engine.generate(prompts, **params)
    fill_device(engine)
    return {"answers": answers + engine.generate(prompts, **params)}


@workload
def beams(engine: Engine) -> dict[str, Any]:
    """Beam search: every token is a request of its own, with a shared prefix."""
    prompts = [{"prompt_token_ids": text(1200, 4 * BLOCK + 9)}]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found: list[Any] = []
    for _ in range(2):
        found += engine.llm.beam_search(prompts, params)
        fill_device(engine)
    answers = []
    for output in found:
        best, *others = output.sequences
        answers.append(
            Answer(
                tokens=list(best.tokens),
                logprobs=[[(0, best.cum_logprob)]],
                others=[list(beam.tokens) for beam in others],
                prompt_logprobs=[],
                cached_tokens=0,
            )
        )
    return {"answers": answers}


@workload
def paused(engine: Engine) -> dict[str, Any]:
    """Scheduling rests while requests run; the cache is kept, then cleared."""
    prompts = [text(1300 + i, 4 * BLOCK + 5) for i in range(3)]
    answers, filled = [], []
    # Both tiers have something to keep.
    fill_device(engine, seed=950)
    for clear_cache in (False, True):
        engine.start(prompts, max_tokens=12)
        engine.steps(4)
        engine.core.pause_scheduler("keep", clear_cache=clear_cache)
        filled.append(engine.num_cached())
        engine.core.resume_scheduler()
        answers += engine.finish()
        fill_device(engine)
        answers += ask_one_by_one(engine, prompts)
    return {"answers": answers, "filled": filled}


@workload
def reset_running(engine: Engine) -> dict[str, Any]:
    """The cache is reset under requests that run; they begin anew."""
    prompts = [text(1400 + i, 4 * BLOCK + 5) for i in range(4)]
    answers = ask_one_by_one(engine, prompts)
    fill_device(engine)
    engine.start(prompts, max_tokens=12)
    engine.steps(4)
    was_reset = engine.core.reset_prefix_cache(reset_running_requests=True)
    filled = engine.num_cached()
    answers += engine.finish()
    answers += ask_one_by_one(engine, [text(1450, 40)])
    return {"answers": answers, "was_reset": was_reset, "filled": filled}


@workload
def new_weights(engine: Engine) -> dict[str, Any]:
    """Other weights come, and later the first ones again.

    `stale` has what is answered between the new weights and the reset that
    upstream asks for.
    """
    prompts = [text(1500 + i, 5 * BLOCK + 5) for i in range(3)]
    answers = ask_one_by_one(engine, prompts)
    fill_device(engine)
    with scratch_folder() as folder:
        engine.reload_weights(make_llama(folder, seed=1))
    stale = ask_one_by_one(engine, prompts)
    was_reset = [engine.reset()]
    answers += ask_one_by_one(engine, prompts)
    fill_device(engine)
    answers += ask_one_by_one(engine, prompts)
    engine.reload_weights()
    was_reset.append(engine.reset())
    answers += ask_one_by_one(engine, prompts)
    return {"answers": answers, "stale": stale, "was_reset": was_reset}


@workload
def asleep(engine: Engine) -> dict[str, Any]:
    """The engine sleeps on each level, and wakes up with other weights after 2."""
    prompts = [text(1600 + i, 5 * BLOCK + 5) for i in range(3)]
    answers, filled = [], []
    for level in (0, 1, 2):
        ask_one_by_one(engine, prompts)
        fill_device(engine)
        engine.llm.sleep(level=level)
        filled.append(engine.num_cached())
        engine.llm.wake_up(tags=["scheduling"] if level == 0 else None)
        if level == 2:
            with scratch_folder() as folder:
                engine.reload_weights(make_llama(folder, seed=1))
        answers += ask_one_by_one(engine, prompts)
    engine.reload_weights()
    engine.reset()
    return {"answers": answers, "filled": filled}


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def look(
    engine: Engine, before_round: Callable[[int], None] = lambda number: None
) -> dict[str, Any]:
    """Twice a question about four pictures, and another one about the first.

    A picture takes the first `IMAGE_TOKENS` of a prompt, always the same tokens.
    """
    question, other = text(1800, 80), text(1801, 80)
    a, b, c, d = map(picture, range(4))
    asked = [(a, question), (b, question), (c, question), (d, question), (a, other)]
    answers = []
    for number in range(2):
        before_round(number)
        for image, prompt in asked:
            answers += engine.generate([prompt], images=[image], max_tokens=8)
    return {"answers": answers}


@workload
def images(engine: Engine) -> dict[str, Any]:
    return look(engine, lambda number: fill_device(engine))


@workload
def corrupt_images(engine: Engine) -> dict[str, Any]:
    """One slot is wrong when it is loaded. Asks what `images` asks."""

    def before_round(number: int) -> None:
        fill_device(engine)
        if number == 1:
            engine.on_ranks(spoil_first_load, engine.slots_of(group=0))

    result = look(engine, before_round)
    return {**result, "spoilt": engine.on_ranks(stop_spoiling)}


@workload
def lora_reloads(engine: Engine) -> dict[str, Any]:
    """An adapter gets other weights again and again, from the same path.

    Each time `answers` has what is said after the reload and, from the host, once
    more; `expected` what an adapter says that has had these weights from the start.
    """
    prompt = text(1700, 5 * BLOCK + 1)
    answers: list[Answer] = []
    expected: list[Answer] = []

    def ask(lora: LoRARequest) -> list[Answer]:
        return engine.generate([prompt], lora=lora, max_tokens=8)

    with scratch_folder() as folder:
        path = folder / "adapter"

        def adapter(number: int = 50, **more: Any) -> LoRARequest:
            return LoRARequest("adapter", number, str(path), **more)

        def say(lora: LoRARequest, again: LoRARequest, seed: int) -> None:
            answers.extend(ask(lora))
            fill_device(engine)
            answers.extend(ask(again))
            fill_device(engine)
            other = make_lora(folder / f"other{seed}", seed)
            expected.extend(2 * ask(LoRARequest(other.name, 60 + seed, str(other))))

        make_lora(path, seed=1)
        say(adapter(), adapter(), 1)
        # Like POST /v1/load_lora_adapter with load_inplace, whose requests go on
        # saying so.
        make_lora(path, seed=2)
        engine.core.add_lora(adapter(load_inplace=True))
        say(adapter(load_inplace=True), adapter(load_inplace=True), 2)
        # LLM.generate: the request itself reloads.
        make_lora(path, seed=3)
        say(adapter(load_inplace=True), adapter(), 3)
        # Unloaded and loaded: the server gives it another id.
        make_lora(path, seed=4)
        engine.core.remove_lora(50)
        engine.core.add_lora(adapter(51))
        say(adapter(51), adapter(51), 4)
        # The control: keys as upstream's.
        hasher = engine.core.request_block_hasher
        set_adapter_loads(None, hasher)
        make_lora(path, seed=1)
        first = ask(adapter(52, load_inplace=True))
        make_lora(path, seed=2)
        engine.core.add_lora(adapter(52, load_inplace=True))
        stale = ask(adapter(52))
        set_adapter_loads(AdapterLoads(), hasher)
    return {"answers": answers, "expected": expected, "stale": [*first, *stale]}


@workload
def spoilt_features(engine: Engine) -> dict[str, Any]:
    """The first block that each of `SERVED` loads is wrong."""
    results = {}
    unasked = lacking({})
    for name in SERVED:
        if name in unasked:
            continue
        assert engine.reset()
        engine.on_ranks(spoil_first_load, range(engine.pool.host.num_slots))
        answers = WORKLOADS[name](engine)["answers"]
        spoilt = engine.on_ranks(stop_spoiling)
        results[name] = {"answers": answers, "spoilt": spoilt}
    return results
