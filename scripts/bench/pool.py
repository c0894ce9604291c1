# SPDX-License-Identifier: Apache-2.0
"""Two engines behind a random router: one pool against separate tiers and connectors.

    python scripts/bench/pool.py --out DIR
    python scripts/bench/pool.py --out DIR --device cpu --size tiny --host-gib 0.0625 \\
        --device-gib 0.015625 --first 256 512 --turn 32 --answer 8 --probe 1024 \\
        --clients 8 --llm '{"block_size": 32}' --restarts 1

Turns of conversations come in a random order, and each goes to an engine drawn at
random; when a conversation has had all its turns, another one begins. Every turn
repeats all tokens before it. All configurations have the same host memory in sum and
are asked the same turns in the same order for as long. `one` is a single engine with
all the host memory: its rate is that of one GPU, its hits are what the pool could have.
Hits fall while conversations end and others begin, so those of a fast configuration are
compared with others by `same_turns`: the first turns, which all have been asked.

`--configs` has groups: engines of a group start at once, and take turns. With
`--restarts`, engines of the pool are killed under load and started anew, with an engine
without a tier started at the same time: prompts that the dead engine had computed are
asked of both. Results are lines of DIR/results.jsonl as soon as they are known.

Ends with 1 if something did not run, an engine that was not killed left a request
without an answer, or an answer after a restart differs from that before.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, NamedTuple

import numpy as np
from suite.client import Answer
from suite.configs import configs
from suite.engines import PLANTS, Engine
from suite.jobs import UTILIZATION
from suite.loader import LOAD_FORMAT
from suite.model import SHAPES, write_config
from suite.options import parser_of

GIB = 1 << 30
POOL, SEPARATE, ONE = "pool", "separate", "one"
ANSWER_S = 60.0
"""A request without an answer for so long hangs."""
START_S = 220.0
"""An engine that is not ready by then failed."""
OPENED_S = 60.0
"""Host memory that is not open by then is not waited for."""
TAIL = 2500


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `Turns`, and of those that ask them."""
    add = parser.add_argument
    add("--conversations", type=int, default=64, help="under way")
    add("--turns", type=int, default=8)
    add("--first", type=int, nargs=2, default=[4096, 8192], help="tokens, at random")
    add("--turn", type=int, default=512, help="tokens that each turn adds")
    add("--answer", type=int, default=32, help="tokens of an answer")
    add("--clients", type=int, default=20)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "8b")
    add_turns(parser)
    add = parser.add_argument
    add("--configs", nargs="*", default=["pool", f"{SEPARATE},simple-lazy,{ONE}"])
    add("--gpus", type=int, default=2)
    add("--engines", type=int, help="in turns on the GPUs; by default one on each")
    add("--host-gib", type=float, default=64, help="of all engines together")
    add("--device-gib", type=float, default=16, help="KV cache of each engine")
    add("--seconds", type=float, default=60)
    add("--restarts", type=int, default=0)
    add("--lead", type=float, default=2, help="seconds until devices evict probes")
    add("--kill-after", type=float, default=2, help="seconds of load")
    add("--probes", type=int, default=3, help="prompts for each restart")
    add("--probe", type=int, default=16384, help="their tokens")
    add("--checks", type=int, default=12, help="prompts of the load, asked again")
    add("--batch-invariant", action="store_true", help="answers must be equal")
    add("--llm", type=json.loads, default={}, help="arguments of all engines, as JSON")
    add(
        "--extra",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='a configuration with other options of the tier: \'pool-through={"debug": '
        '{"store_policy": "write_through"}}\'; it is like the one that its name begins '
        "with",
    )
    add("--seed", type=int, default=0)
    add("--time-limit", type=float, default=7 * 86400.0, metavar="SECONDS")
    args = parser.parse_args()
    args.extra = {
        name: json.loads(options)
        for name, _, options in (text.partition("=") for text in args.extra)
    }
    args.engines = args.engines or args.gpus
    if args.conversations <= args.clients:
        parser.error("--conversations must be more than --clients.")
    return args


class Turn(NamedTuple):
    """One request."""

    name: str
    prompt: list[int]
    engine: int
    """Number that was drawn for it."""
    num_known: int
    """First tokens of the prompt that were in an earlier one."""


class Turns:
    """Turns of conversations in a random order. The same seed gives the same.

    Args:
        args: Of the command line.

    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._vocab = SHAPES[args.size].vocab
        self._rng = random.Random(args.seed)
        self._num_begun = 0
        self._recent: deque[int] = deque(maxlen=args.clients)
        # Of each conversation: its tokens, the length of its first prompt, and how many
        # turns it has had.
        places = range(args.conversations)
        self._active = [self._begin(i % args.turns) for i in places]

    def _begin(self, num_had: int) -> tuple[list[int], int, int]:
        args = self._args
        rng = np.random.default_rng([args.seed, self._num_begun])
        first = int(rng.integers(args.first[0], args.first[1] + 1))
        num = first + args.turns * args.turn
        tokens = rng.integers(3, self._vocab, num).tolist()
        self._num_begun += 1
        return tokens, first, num_had

    def openings(self) -> Iterator[Turn]:
        """What all conversations have had before the first turn."""
        for i, (tokens, first, had) in enumerate(self._active):
            end = first + max(had - 1, 0) * self._args.turn
            yield Turn(f"opening {i}", tokens[:end], self._draw(), 0)

    def repeats(self) -> Iterator[Turn]:
        """Last turns once more: nothing in them is new."""
        while True:
            place = self._rng.randrange(len(self._active))
            tokens, first, had = self._active[place]
            end = first + max(had - 1, 0) * self._args.turn
            yield Turn(f"{place} again", tokens[:end], self._draw(), end)

    def _draw(self) -> int:
        return self._rng.randrange(1 << 30)

    def __iter__(self) -> Iterator[Turn]:
        args = self._args
        while True:
            place = self._rng.randrange(len(self._active))
            if place in self._recent:
                continue
            self._recent.append(place)
            tokens, first, had = self._active[place]
            end = first + had * args.turn
            known = end - args.turn if had else 0
            yield Turn(f"{place}-{had}", tokens[:end], self._draw(), known)
            over = had + 1 == args.turns
            self._active[place] = self._begin(0) if over else (tokens, first, had + 1)


class Asked(NamedTuple):
    """A request that has ended."""

    turn: Turn
    engine: Engine
    answer: Answer
    ended: float
    error: str


async def ask(engine: Engine, turn: Turn, max_tokens: int) -> Asked:
    """Ask an engine; an error is a result."""
    answer, error = Answer(turn.name, len(turn.prompt), time.perf_counter()), ""
    try:
        asked = engine.ask(answer, turn.prompt, max_tokens)
        await asyncio.wait_for(asked, ANSWER_S)
    except TimeoutError:
        error = f"no answer within {ANSWER_S:.0f} s"
    except (RuntimeError, OSError, ValueError, KeyError) as e:
        error = repr(e)
    return Asked(turn, engine, answer, time.perf_counter(), error)


async def load(
    args: argparse.Namespace,
    engines: Sequence[Engine],
    turns: Iterator[Turn],
    seconds: float,
) -> list[Asked]:
    """Ask turns for so long, by as many clients at a time."""
    ended: list[Asked] = []
    until = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < until and (turn := next(turns, None)) is not None:
            engine = engines[turn.engine % len(engines)]
            ended.append(await ask(engine, turn, args.answer))
            if ended[-1].error:
                # A router would notice that the engine is gone.
                await asyncio.sleep(0.2)

    await asyncio.gather(*(client() for _ in range(args.clients)))
    return ended


def figures(asked: Sequence[Asked], begun: float, seconds: float) -> dict[str, Any]:
    """What a load gave. Rates count what ended within `seconds`."""
    good = [each for each in asked if not each.error]
    within = [each for each in good if each.ended - begun <= seconds]
    if len(within) < 2:
        return {"requests": len(within), "failed": len(asked) - len(good)}
    prompt = sum(len(each.turn.prompt) for each in good)
    ttft = [each.answer.ttft_s * 1e3 for each in good]
    later = [e.answer.times[-1] - e.answer.times[0] for e in good]
    steps = sum(len(each.answer.times) - 1 for each in good)
    return {
        "requests": len(within),
        "failed": len(asked) - len(good),
        "requests_per_s": round(len(within) / seconds, 3),
        "cached": round(sum(e.answer.cached_tokens for e in good) / prompt, 4),
        "seen_before": round(sum(e.turn.num_known for e in good) / prompt, 4),
        "ttft_ms": round(mean(ttft), 1),
        "ttft_p90_ms": round(quantiles(ttft, n=10)[-1], 1),
        "token_ms": round(sum(later) / max(steps, 1) * 1e3, 2),
    }


@dataclass
class Started:
    """Engines of a configuration that are ready."""

    name: str
    engines: list[Engine]
    begin: Callable[..., Engine]
    """Starts one more for a GPU, under a name; with True, one without a tier."""
    warm: list[Engine]
    """Engines that end when they are ready."""


class Bench:
    """Starts engines, and asks them.

    Args:
        args: Of the command line.
        ends: When everything must be over, by `time.monotonic`.

    """

    def __init__(self, args: argparse.Namespace, ends: float) -> None:
        self._args, self._ends = args, ends
        self._model = args.out / f"model-{args.size}"
        on_gpu = args.device == "cuda"
        dtype = "bfloat16" if on_gpu else "float32"
        write_config(self._model, SHAPES[args.size], dtype)
        # A pool looks at the files of weights. The loader, which makes weights from the
        # shape, needs none.
        (self._model / "model.safetensors").write_text(LOAD_FORMAT)
        longest = max(args.probe, args.first[1] + args.turns * args.turn)
        self._llm: dict[str, Any] = {
            "model": str(self._model),
            "load_format": LOAD_FORMAT,
            "dtype": dtype,
            "max_model_len": -(-(longest + args.answer + 64) // 64) * 64,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "enforce_eager": not on_gpu,
            # So that others have room on the GPU.
            "gpu_memory_utilization": UTILIZATION,
            "kv_cache_memory_bytes": int(args.device_gib * GIB),
        }
        self.wrong: list[str] = []
        # By configuration, in the order of turns.
        self._asked: dict[str, list[Asked]] = {}

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def tell(self, **line: Any) -> None:
        """Print a result and write it down."""
        print(json.dumps(line), flush=True)
        with (self._args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fail(self, why: str) -> None:
        self.wrong.append(why)
        print(f"WRONG: {why}", flush=True)

    def compare_hits(self) -> None:
        """Print which part of the same turns was cached, by configuration."""
        num = min(map(len, self._asked.values()), default=0)
        cached = {
            name: round(
                sum(each.answer.cached_tokens for each in asked[:num])
                / sum(len(each.turn.prompt) for each in asked[:num]),
                4,
            )
            for name, asked in self._asked.items()
            if num
        }
        self.tell(same_turns=num, cached=cached)

    # ------------------------------------------------------------------ starts

    def run(self, group: Sequence[str]) -> None:
        """Start the engines of these configurations at once, then ask each of them."""
        with ExitStack() as stack:
            begun = {name: self._begin(name, stack) for name in group}
            with ThreadPoolExecutor(len(group)) as waiting:
                found = dict(zip(group, waiting.map(self._ready, begun.values())))
            ready = [started for name in group if (started := found[name])]
            for started in ready:
                for engine in started.engines:
                    engine.pause()
            for started in ready:
                if self.left_s < self._args.seconds + 15:
                    self.fail(f"{started.name}: not reached: time limit")
                    continue
                for engine in started.engines:
                    engine.go_on()
                try:
                    asyncio.run(self._ask(started))
                finally:
                    for engine in started.engines:
                        engine.pause()

    def _begin(self, name: str, stack: ExitStack) -> Started | None:
        args = self._args
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        num = 1 if name.startswith(ONE) else args.engines
        llm, env = self._settings(name, num)
        if name.startswith(POOL):
            path = sockets / "keeper"
            try:
                self._start_keeper(path, folder / "keeper.log", stack)
            except RuntimeError as e:
                self.fail(f"{name}: {e}")
                return None
            options = llm["kv_offloading_config"] | {"pool": str(path)}
            llm |= {"kv_offloading_config": options}

        def begin(gpu: int, label: str, alone: bool = False) -> Engine:
            mine: dict[str, Any] = {} if alone else llm
            settings = self._llm | self._args.llm | mine
            variables = self._variables(gpu) | ({} if alone else env)
            engine = Engine(label, settings, variables, folder, sockets)
            stack.callback(engine.end)
            return engine

        engines = [begin(gpu, f"engine{gpu}") for gpu in range(num)]
        # What an engine without a tier compiles is in the cache before it is timed.
        warms = name.startswith(POOL) and args.restarts
        warm = [begin(0, "warm", True)] if warms else []
        return Started(name, engines, begin, warm)

    def _settings(self, name: str, num: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Arguments and variables of the engines of a configuration."""
        args = self._args
        if not name.startswith((POOL, SEPARATE, ONE)):
            known = configs(args.host_gib / num, int(args.device_gib * GIB))
            return known[name].llm, known[name].env
        options = {"debug": {}} | args.extra.get(name, {})
        options["debug"] = {"check_memory": False} | options["debug"]
        llm: dict[str, Any] = {
            "kv_offloading_backend": "core",
            "kv_offloading_config": options,
        }
        if not name.startswith(POOL):
            llm["kv_offloading_size"] = args.host_gib / num
        return llm, {}

    def _variables(self, gpu: int) -> dict[str, str]:
        env = {"PYTHONHASHSEED": "0"}
        if self._args.batch_invariant:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if self._args.device == "cuda":
            return env | {"CUDA_VISIBLE_DEVICES": str(gpu % self._args.gpus)}
        return env | {PLANTS: "bind_no_worker"}

    def _start_keeper(self, path: Path, log: Path, stack: ExitStack) -> None:
        args, begun = self._args, time.monotonic()
        command = [
            sys.executable,
            "-m",
            "vllm.v1.kv_tier.keeper",
            "--socket",
            str(path),
        ]
        command += ["--size", str(args.host_gib), "--engines", str(args.engines)]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(process.wait)
        stack.callback(process.kill)
        while "partitions of" not in (said := log.read_text()):
            if process.poll() is not None or self.left_s < 0:
                raise RuntimeError(f"the keeper did not start:\n{said[-TAIL:]}")
            time.sleep(0.1)
        self.tell(start="keeper", ready_s=round(time.monotonic() - begun, 2))

    def _ready(self, started: Started | None) -> Started | None:
        """Wait for all engines; None if one did not start."""
        if started is None:
            return None
        name, all_ = started.name, [*started.engines, *started.warm]
        with ThreadPoolExecutor(len(all_)) as waiting:
            is_ready = [*waiting.map(lambda engine: self._wait(name, engine), all_)]
        for engine in started.warm:
            engine.end()
        if all(is_ready[: len(started.engines)]):
            return started
        for engine in started.engines:
            engine.end()
        return None

    def _wait(self, name: str, engine: Engine) -> bool:
        """Wait for an engine. Writes down how long its start took, and why."""
        try:
            ready_s = engine.wait(min(self._ends, time.monotonic() + START_S))
        except RuntimeError as e:
            log = engine.log.read_text(errors="replace")
            self.fail(f"{name}: {e}")
            print(f"End of {engine.log}:\n{log[-TAIL:]}", flush=True)
            return False
        opened_s = opened(engine, min(OPENED_S, self.left_s))
        self.tell(
            start=name,
            engine=engine.name,
            ready_s=round(ready_s, 2),
            opened_s=round(opened_s, 1),
            **parts_of_start(engine.log.read_text(errors="replace")),
        )
        return True

    # ------------------------------------------------------------------ load

    async def _ask(self, started: Started) -> None:
        args, name = self._args, started.name
        turns = Turns(args)
        begun = time.perf_counter()
        await load(args, started.engines, turns.openings(), 3 * args.seconds)
        warm_s = time.perf_counter() - begun
        before = [await engine.count() for engine in started.engines]
        seconds = min(args.seconds, self.left_s - 10)
        begun = time.perf_counter()
        asked = await load(args, started.engines, iter(turns), seconds)
        after = [await engine.count() for engine in started.engines]
        self.tell(
            config=name,
            **figures(asked, begun, seconds),
            seconds=seconds,
            warm_s=round(warm_s, 1),
            counts=[grown(*each) for each in zip(before, after)],
        )
        self._write(name, asked, begun)
        self._asked[name] = sorted(asked, key=lambda each: each.answer.sent)
        if failed := [each.error for each in asked if each.error]:
            self.fail(f"{name}: {len(failed)} requests failed, the first: {failed[0]}")
        if name.startswith(POOL):
            for number in range(args.restarts):
                if self.left_s < 60:
                    self.fail(f"restart {number}: not reached: time limit")
                    break
                await self._restart(started, number, turns)

    def _write(self, name: str, asked: Sequence[Asked], begun: float) -> None:
        with (self._args.out / f"requests-{name}.jsonl").open("w") as file:
            for each in asked:
                times = each.answer.times
                ttft = round(times[0] - each.answer.sent, 4) if times else None
                line = {
                    "name": each.turn.name,
                    "engine": each.engine.name,
                    "sent": round(each.answer.sent - begun, 3),
                    "ended": round(each.ended - begun, 3),
                    "ttft": ttft,
                    "prompt": len(each.turn.prompt),
                    "seen_before": each.turn.num_known,
                    "cached": each.answer.cached_tokens,
                    "error": each.error,
                }
                file.write(json.dumps(line) + "\n")

    # ------------------------------------------------------------------ restarts

    async def _restart(self, started: Started, number: int, turns: Turns) -> None:
        """Kill an engine under load, start it again, and compare its answers."""
        args = self._args
        gpu = number % args.engines
        victim = started.engines[gpu]
        probes = self._probes(number)
        computed = [await ask(victim, each, args.answer) for each in probes]
        # Until the device has evicted them. Then they are asked again: the answers to
        # compare with, since the same part is cached.
        await load(args, started.engines, turns.repeats(), args.lead)
        again = [await ask(victim, each, args.answer) for each in probes]
        await load(args, started.engines, turns.repeats(), args.lead)
        loading = asyncio.create_task(
            load(args, started.engines, iter(turns), 2 * args.kill_after)
        )
        await asyncio.sleep(args.kill_after)
        killed = time.perf_counter()
        victim.end()
        asked = await loading
        lost = [each for each in asked if each.error and each.engine is victim]
        failed = [each for each in asked if each.error and each.engine is not victim]
        if failed:
            self.fail(f"{len(failed)} requests failed elsewhere: {failed[0].error}")
        # On another GPU, at the same time, in turns.
        other = (gpu + 1) % args.engines
        heir = started.begin(gpu, f"heir{number}")
        plain = started.begin(other, f"plain{number}", True)
        waits = [("heir", heir), ("plain", plain)]
        is_ready = await asyncio.gather(
            *(asyncio.to_thread(self._wait, *each) for each in waits)
        )
        if not all(is_ready):
            return
        started.engines[gpu] = heir
        from_pool = [await ask(heir, each, args.answer) for each in probes]
        without = [await ask(plain, each, args.answer) for each in probes]
        good = [each for each in asked if not each.error]
        late = [e for e in good if e.ended < killed][-args.checks // 2 :]
        late += [e for e in good if e.ended >= killed][: args.checks // 2]
        checks = await self._compare(heir, plain, [each.turn for each in late])
        plain.end()
        self.tell(
            restart=number,
            lost=len(lost),
            served_meanwhile=sum(e.ended >= killed for e in good),
            failed_elsewhere=len(failed),
            probes={
                "computed": of_probes(computed, computed),
                "cached": of_probes(again, computed),
                "from the pool": of_probes(from_pool, again),
                "without a tier": of_probes(without, computed),
            },
            checks=checks,
        )
        self._judge(from_pool, again, checks)

    def _probes(self, number: int) -> list[Turn]:
        args = self._args
        rng = np.random.default_rng([args.seed, number, 7, 7])
        vocab = SHAPES[args.size].vocab
        shape = args.probes, args.probe
        prompts = rng.integers(3, vocab, shape).tolist()
        return [Turn(f"probe {i}", p, 0, 0) for i, p in enumerate(prompts)]

    async def _compare(
        self, heir: Engine, plain: Engine, turns: Sequence[Turn]
    ) -> dict[str, Any]:
        """Prompts of the load again, by an engine of the pool and by one without."""
        args = self._args

        async def answers(engine: Engine) -> list[Asked]:
            return [await ask(engine, turn, args.answer) for turn in turns]

        mine, right = await asyncio.gather(answers(heir), answers(plain))
        tokens = [(a.answer.tokens, b.answer.tokens) for a, b in zip(mine, right)]
        others = [(a, b) for (a, _), (_, b) in zip(tokens, tokens[1:])]
        return {
            "prompts": len(turns),
            "cached": sum(each.answer.cached_tokens for each in mine),
            "failed": sum(bool(each.error) for each in (*mine, *right)),
            "equal": sum(a == b for a, b in tokens),
            "equal_first_token": sum(a[:1] == b[:1] for a, b in tokens),
            "equal_to_another_answer": sum(a == b for a, b in others),
        }

    def _judge(
        self,
        from_pool: Sequence[Asked],
        again: Sequence[Asked],
        checks: dict[str, Any],
    ) -> None:
        args = self._args
        exact = args.batch_invariant or args.device == "cpu"
        for old, new in zip(again, from_pool):
            name, cached = new.turn.name, new.answer.cached_tokens
            is_same = old.answer.tokens == new.answer.tokens
            # Where less is cached, rounding differs.
            must_be_same = exact or cached == old.answer.cached_tokens
            if new.error or (must_be_same and not is_same):
                self.fail(f"{name}: {new.error or 'another answer after the restart'}")
            if cached < 0.9 * args.probe:
                self.fail(f"{name}: {cached} tokens of {args.probe} are from the pool")
        if checks["failed"] or (exact and checks["equal"] < checks["prompts"]):
            self.fail(f"answers after the restart: {checks}")


def opened(engine: Engine, limit_s: float) -> float:
    """Wait until all host memory of an engine is open; the seconds that took."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit_s:
        log = engine.log.read_text(errors="replace")
        done = re.search(r"([\d.]+) of \1 GiB of host memory ready, after", log)
        if done or " are open" not in log:
            break
        time.sleep(0.5)
    return time.monotonic() - begun


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Counters of the tier, of preemptions, and of what was computed."""
    wanted = r"vllm:(kv_tier_.*|num_preemptions|prompt_tokens|.*cache_hits.*)_total"
    return {
        name.removeprefix("vllm:"): round(value - before.get(name, 0.0), 3)
        for name, value in after.items()
        if re.fullmatch(wanted, name) and value > before.get(name, 0.0)
    }


def of_probes(asked: Sequence[Asked], like: Sequence[Asked]) -> dict[str, Any]:
    """Cached tokens and times of some probes; the first one by itself."""
    return {
        "cached": [each.answer.cached_tokens for each in asked],
        "ttft_ms": [
            round(each.answer.ttft_s * 1e3, 1) if each.answer.times else None
            for each in asked
        ],
        "equal": sum(a.answer.tokens == b.answer.tokens for a, b in zip(asked, like)),
        "different_tokens": len({t for each in asked for t in each.answer.tokens}),
        "errors": Counter(each.error for each in asked if each.error),
    }


def parts_of_start(log: str) -> dict[str, float]:
    """Seconds of a start, as the engine's log has them."""
    parts = {
        "import_s": r"import.* took ([\d.]+) s",
        "load_s": r"Model loading took .* and ([\d.]+) seconds",
        "compile_s": r"torch\.compile took ([\d.]+) s",
        "graphs_s": r"Graph capturing finished in ([\d.]+) secs",
        "init_s": r"init engine .* took ([\d.]+) s",
        "pinned_s": r"KV tier: \d+ host slots .* on this rank in ([\d.]+) s",
        "adopted_blocks": r"pool at .*, with (\d+) blocks",
    }
    found = {name: re.findall(regex, log) for name, regex in parts.items()}
    return {name: float(values[-1]) for name, values in found.items() if values}


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, time.monotonic() + args.time_limit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for group in args.configs:
        if bench.left_s < args.seconds + 45:
            bench.fail(f"{group}: not reached: time limit")
            continue
        bench.run(group.split(","))
    bench.compare_hits()
    print("\n".join(bench.wrong) or "All is as it must be.")
    return int(bool(bench.wrong))


if __name__ == "__main__":
    sys.exit(main())
