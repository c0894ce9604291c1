# SPDX-License-Identifier: Apache-2.0
"""An engine of `meet_check.py`, in a process of its own: what it is asked to do.

    python meet_engine.py JOB.json

It writes NAME.ready, waits for a line on its standard input, and writes NAME.json.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TAIL = 32
"""Tokens after a prefix, which no other request has."""
WRITE_S = 60.0
WARM_UP = 2
"""Requests of each rate that are not counted."""


@dataclass(frozen=True)
class Sizes:
    """What is asked. Lengths in tokens."""

    max_len: int
    """Of a request."""
    lengths: tuple[int, ...]
    """Of the prefixes. The last is met while others decode, the first by many."""
    num_prefixes: int
    """Of each length. All together, device and host cannot hold them."""
    rates: tuple[float, ...]
    """GB/s of the store; inf: as fast as it is."""
    repeats: int
    together: int
    """Requests with one prefix."""
    together_output: int
    decoders: int
    equal_prefixes: int
    """For the comparison with an engine without a tier."""
    equal_length: int
    equal_rounds: int
    equal_output: int


class Engine:
    """An `LLM` whose core is in this process.

    Args:
        job: As `meet_check.py` writes it.

    """

    def __init__(self, job: dict[str, Any]) -> None:
        from suite.loader import LOAD_FORMAT

        from vllm import LLM
        from vllm.v1.kv_tier.stores import identity

        # Its weights are the same in every process, so its name identifies them.
        identity._FROM_FOLDER |= {LOAD_FORMAT}
        model = Path(job["llm"]["model"])
        (model / "model.safetensors").write_text(LOAD_FORMAT)
        self.folder = Path(job["folder"])
        self.sizes = Sizes(**job["sizes"])
        self.token_bytes = job["token_bytes"]
        self.is_cpu = job["device"] == "cpu"
        self.block_size = job["llm"]["block_size"]
        self.rate_file = Path(job["rate_file"])
        self.rate_file.write_text("inf")
        self.llm: Any = LLM(
            skip_tokenizer_init=True,
            load_format=LOAD_FORMAT,
            disable_log_stats=False,
            **job["llm"],
        )
        self.core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._vocab = self.core.vllm_config.model_config.get_vocab_size()
        self._next: Counter[int] = Counter()
        self.num_asked = 0
        self._num_blocks = 0

    def tokens(self, seed: object, num_tokens: int) -> list[int]:
        return random.Random(str(seed)).choices(range(3, self._vocab), k=num_tokens)

    def fresh(self, num_tokens: int) -> list[int]:
        """A prompt that no engine has had."""
        self.num_asked += 1
        return self.tokens(("fresh", self.folder.name, self.num_asked), num_tokens)

    def prompt(self, length: int, number: int) -> list[int]:
        """A prefix and a new tail."""
        return self.tokens((length, number), length) + self.fresh(TAIL)

    def evicted(self, length: int) -> list[int]:
        """The prompt of the prefix that was used longest ago."""
        number = self._next[length] % self.sizes.num_prefixes
        self._next[length] += 1
        return self.prompt(length, number)

    def ask(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
        """Seconds until all have answered, and the answers."""
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        begun = time.perf_counter()
        answers = self.llm.generate(batch, greedy(max_tokens), use_tqdm=False)
        return time.perf_counter() - begun, answers

    def ttft(self, prompt: list[int]) -> float:
        return self.ask([prompt], 1)[0]

    def counters(self) -> dict[str, float]:
        """Tokens and blocks that the tier has counted so far."""
        found = {m.name: getattr(m, "value", None) for m in self.llm.get_metrics()}
        names = (
            "jumped_tokens",
            "secondary_loaded_blocks",
            "secondary_overtaken_blocks",
            "secondary_stored_blocks",
        )
        return {name: found.get(f"vllm:kv_tier_{name}") or 0 for name in names}

    def write(self, prompt: list[int]) -> float:
        """Seconds to compute a new prompt, which the store has afterwards. Short
        requests, whose steps begin and end writes, follow until then."""
        seconds = self.ttft(prompt)
        self._num_blocks += len(prompt) // self.block_size
        limit = time.monotonic() + WRITE_S
        while self.counters()["secondary_stored_blocks"] < self._num_blocks:
            if time.monotonic() > limit:
                raise RuntimeError(f"Of {self._num_blocks} blocks: {self.counters()}")
            self.ask([self.fresh(3)], 2)
        return seconds

    def fill(self, lengths: tuple[int, ...], num: int) -> dict[int, list[float]]:
        """Let the store have all prefixes. Seconds to compute each, by length."""
        for n in lengths:
            self.write(self.fresh(n + TAIL))
        seconds: dict[int, list[float]] = {n: [] for n in lengths}
        for number in range(num):
            for n in lengths:
                seconds[n].append(self.write(self.prompt(n, number)))
        return seconds


def greedy(max_tokens: int, **others: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        detokenize=False,
        ignore_eos=True,
        **others,
    )


def first_tokens(
    engine: Engine, rates: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """Time to first token of evicted prefixes.

    Args:
        engine: Whose store has them.
        rates: By length, and by name: bytes per second of the store.

    """
    rows: list[dict[str, Any]] = []
    names = sorted(next(iter(rates.values())), key=lambda n: _of_all(rates, n))
    for name in reversed(names):
        found: list[dict[str, Any]] = [
            {"length": int(n), "rate": name, "bytes_per_s": named[name], "seconds": []}
            for n, named in rates.items()
        ]
        # Lengths take turns, so that many bytes pass before one prefix comes again. The
        # first requests meet a store of which the engine thinks otherwise.
        for i in range(WARM_UP + engine.sizes.repeats):
            for row in found:
                engine.rate_file.write_text(repr(row["bytes_per_s"]))
                before = engine.counters()
                seconds = engine.ttft(engine.evicted(row["length"]))
                if i < WARM_UP:
                    continue
                row["seconds"].append(seconds)
                for key, value in engine.counters().items():
                    row[key] = row.get(key, 0) + value - before[key]
        rows += found
    engine.rate_file.write_text("inf")
    return rows


def _of_all(rates: dict[str, dict[str, float]], name: str) -> float:
    return sum(named[name] for named in rates.values())


def together(engine: Engine) -> list[dict[str, Any]]:
    """Tokens per second of many requests on one prefix: evicted, then on the device."""
    sizes = engine.sizes
    length = sizes.lengths[0]
    rows = []
    for _ in range(sizes.repeats):
        number = engine._next[length] % sizes.num_prefixes
        engine._next[length] += 1
        rates = []
        for _ in ("evicted", "on the device"):
            prompts = [engine.prompt(length, number) for _ in range(sizes.together)]
            seconds, _ = engine.ask(prompts, sizes.together_output)
            rates.append(sizes.together * sizes.together_output / seconds)
        rows.append({"evicted": rates[0], "device": rates[1]})
    return rows


def gaps_beside(engine: Engine, prompt: list[int]) -> tuple[list[float], float]:
    """Seconds between tokens of requests that decode while `prompt` is computed, and
    seconds until its first token."""
    from vllm.sampling_params import RequestOutputKind

    delta = RequestOutputKind.DELTA
    llm, num = engine.llm.llm_engine, engine.sizes.decoders
    engine.num_asked += 1
    names = [f"decodes-{engine.num_asked}-{i}" for i in range(num)]
    for name in names:
        params = greedy(engine.sizes.max_len // 2, output_kind=delta)
        llm.add_request(name, {"prompt_token_ids": engine.fresh(64)}, params)
    times: dict[str, list[float]] = {name: [] for name in names}
    last = f"last-{engine.num_asked}"
    begun = ended = 0.0
    while not ended:
        outputs = llm.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == last:
                ended = now
            else:
                times[output.request_id].append(now)
        if not begun and min(map(len, times.values())) >= 8:
            begun = now
            llm.add_request(last, {"prompt_token_ids": prompt}, greedy(1))
    llm.abort_request(names)
    gaps = []
    for each in times.values():
        first = sum(t <= begun for t in each) - 1
        gaps += [b - a for a, b in zip(each[first:], each[first + 1 :])]
    return gaps, ended - begun


def beside(engine: Engine, rate: float) -> dict[str, Any]:
    """Gaps of others beside a long prompt: met, and computed in chunks."""
    length = engine.sizes.lengths[-1]
    found: dict[str, Any] = {"met": [], "computed": []}
    found |= {"met_s": [], "computed_s": []}
    engine.rate_file.write_text(repr(rate))
    make: dict[str, Callable[[], list[int]]] = {
        "met": lambda: engine.evicted(length),
        "computed": lambda: engine.fresh(length + TAIL),
    }
    # The first of each is not counted.
    for i in range(1 + engine.sizes.repeats):
        for name, make_prompt in make.items():
            gaps, seconds = gaps_beside(engine, make_prompt())
            if i:
                found[name] += gaps
                found[name + "_s"].append(seconds)
    engine.rate_file.write_text("inf")
    return found


def equal_answers(engine: Engine, has_tier: bool) -> dict[str, Any]:
    """Answers to requests in waves of four, on prefixes that are evicted again and
    again, and how many of them have jumped."""
    sizes, n = engine.sizes, engine.sizes.equal_length
    prefixes = [engine.tokens((n, i), n) for i in range(sizes.equal_prefixes)]
    jumped: set[str] = set()
    if has_tier:
        seconds = engine.fill((n,), sizes.equal_prefixes)[n]
        rate = n * engine.token_bytes / sorted(seconds)[len(seconds) // 2]
        engine.rate_file.write_text(repr(2 * rate))
        _watch_jumps(engine.core.scheduler, jumped)
    tokens, num_jumped = [], 0
    for turn in range(sizes.equal_rounds):
        for i in range(0, len(prefixes), 4):
            jumped.clear()
            prompts = [
                prefix + engine.tokens(("tail", turn, i + k), TAIL)
                for k, prefix in enumerate(prefixes[i : i + 4])
            ]
            _, answers = engine.ask(prompts, sizes.equal_output)
            tokens += [list(answer.outputs[0].token_ids) for answer in answers]
            num_jumped += len(jumped)
    return {"answers": tokens, "jumped": num_jumped, "counters": engine.counters()}


def _watch_jumps(scheduler: Any, jumped: set[str]) -> None:
    """Add requests that jump to a set."""
    schedule = scheduler.schedule

    def schedule_and_watch(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.kv_tier_plan is not None:
            jumped.update(output.kv_tier_plan.jumped)
        return output

    scheduler.schedule = schedule_and_watch


def meets(engine: Engine) -> dict[str, Any]:
    """All times of the engine that meets. Leaves the rates to the one that fetches."""
    sizes = engine.sizes
    computed = engine.fill(sizes.lengths, sizes.num_prefixes)
    rates: dict[str, dict[str, float]] = {}
    for length, seconds in computed.items():
        equal = length * engine.token_bytes / sorted(seconds)[len(seconds) // 2]
        # On a CPU a GB/s is what it is to the H200 that computes 4.4 GB/s of KV.
        unit = equal / 4.4 if engine.is_cpu else 1e9
        rates[str(length)] = {f"{r:g}": r * unit for r in sizes.rates}
        rates[str(length)]["equal"] = equal
    (engine.folder / "rates.json").write_text(json.dumps(rates))
    found: dict[str, Any] = {"computed": computed, "rates": rates}
    found["ttft"] = first_tokens(engine, rates)
    found["together"] = together(engine)
    found["beside"] = beside(engine, rates[str(sizes.lengths[-1])]["equal"])
    return found


def fetches(engine: Engine) -> dict[str, Any]:
    """Times of the engine that always fetches all."""
    rates = json.loads((engine.folder / "rates.json").read_text())
    for length in engine.sizes.lengths:
        engine.ttft(engine.fresh(length + TAIL))
    return {"ttft": first_tokens(engine, rates)}


WORK: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "meets": meets,
    "fetches": fetches,
    "equal": partial(equal_answers, has_tier=True),
    "without": partial(equal_answers, has_tier=False),
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    name, folder = job["name"], Path(job["folder"])
    begun = time.perf_counter()
    engine = Engine(job)
    started = time.perf_counter() - begun
    (folder / f"{name}.ready").touch()
    sys.stdin.readline()
    begun = time.perf_counter()
    result = WORK[name](engine)
    config = engine.core.vllm_config
    result |= {"start_s": started, "work_s": time.perf_counter() - begun}
    result["runner_v2"] = bool(getattr(config, "use_v2_model_runner", False))
    result["async_scheduling"] = bool(config.scheduler_config.async_scheduling)
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
