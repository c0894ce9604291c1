# SPDX-License-Identifier: Apache-2.0
"""Is the tier right on this machine's GPU?

    python scripts/bench/gpu_check.py --out DIR

Makes a random-weight Llama (with `--size 1b-window` a Gemma-3, all of whose layers but
every sixth have windows; with `1b-mla` a DeepSeek), then runs the same greedy
conversations, which outgrow the device cache, in one process for each configuration.
The reference is
`large`: no tier, but a device cache that holds everything. Its prompts are
computed in the same pieces as the tier's, so that outputs must be equal token by
token; against `none` rounding alone flips near-ties in bf16. `again` is the reference
once more.

`slow` delays every copy by a tenth of a second and must change nothing. `race` does
the same with the fences of the plans removed, and the comparison must notice. No load
may fail but in these races: with `verify`, one that does is a checksum taken too early.
Times to first token of an evicted prefix on the idle engine are printed too.

With `--tp` or `--pp` an engine has several GPUs, and its caches are as large all
together. With `--dp` so many replicas run side by side, each on GPUs of its own and
with conversations of its own, as the replicas of a dense model do.

Those that begin with `shared` have ranks that share host slots: they need `--tp 2` with
`--size 1b-mla` or `1b-one-kv-head`, whose ranks hold the same KV, and run if they are
named.
In `shared_slow` and `shared_race` the rank that stores is late; in the latter no other
waits for it, which the comparison must notice.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from suite.model import INDEX, SHAPES, family_of, write_model
from suite.options import add_parallel_options, parallel
from suite.plants import (
    delay_copies,
    delay_stores,
    refuse_to_pin,
    remove_fences,
    wait_for_no_peer,
)

OPENED_S = 120.0
TIER = {"kv_offloading_backend": "core"}


def tier(share_replicas: bool = False, **debug: Any) -> dict[str, Any]:
    options = {"share_replicas": share_replicas, "debug": debug}
    return {"llm": TIER | {"kv_offloading_config": options}}


SHARED = tier(share_replicas=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "large": {"device_scale": 8},
    "again": {"device_scale": 8},
    "none": {},
    "write_back": tier(),
    "write_through": tier(store_policy="write_through"),
    "ahead": tier(max_load_stall_ms=0),
    "in_step": tier(max_load_stall_ms=None),
    "whole_step": tier(max_load_stall_ms=None, layerwise_loads=False),
    "dma": tier(copy_engine="dma"),
    "kernel": tier(copy_engine="kernel"),
    "torch": tier(copy_engine="torch"),
    "slow": tier() | {"plants": (delay_copies,)},
    "slow_ahead": tier(max_load_stall_ms=0) | {"plants": (delay_copies,)},
    "race": tier() | {"plants": (delay_copies, remove_fences)},
    "race_ahead": tier(max_load_stall_ms=0) | {"plants": (delay_copies, remove_fences)},
    "verify": tier(verify=True),
    "slow_verify": tier(verify=True, max_load_stall_ms=0) | {"plants": (delay_copies,)},
    "unpinned": tier() | {"plants": (refuse_to_pin,)},
    "shared": SHARED,
    "shared_verify": tier(share_replicas=True, verify=True),
    "shared_slow": SHARED | {"plants": (delay_stores,)},
    "shared_race": SHARED | {"plants": (delay_stores, wait_for_no_peer)},
    "v1": tier() | {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "OffloadingConnector": {"llm": {"kv_offloading_backend": "native"}},
    "SimpleCPUOffload": {
        "llm": {"kv_offloading_backend": "native"},
        "env": {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"},
    },
}
RACES = ("race", "race_ahead", "shared_race")
MAY_DIFFER = ("none", *RACES)
"""Computed in other pieces than the reference, or wrong on purpose."""


def run_config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run all workloads in this process. Returns outputs and times."""
    from vllm import LLM

    config = CONFIGS[name]
    for plant in config.get("plants", ()):
        plant()
    llm_kwargs: dict[str, Any] = dict(config.get("llm", {}))
    if llm_kwargs:
        llm_kwargs["kv_offloading_size"] = args.host_gib
    llm_kwargs |= parallel(args) | {"data_parallel_size": 1} | args.llm
    block = args.block_size
    started = time.perf_counter()
    llm: Any = LLM(
        str(args.model),
        skip_tokenizer_init=True,
        block_size=block,
        max_model_len=args.max_len,
        kv_cache_memory_bytes=int(
            args.device_gib * config.get("device_scale", 1) * 2**30
        )
        // (args.tp * args.pp),
        max_num_seqs=32,
        gpu_memory_utilization=0.15 if args.at_once else 0.9,
        **llm_kwargs,
    )
    result: dict[str, Any] = {"start_s": time.perf_counter() - started}
    core = llm.llm_engine.engine_core.engine_core
    _wait_until_open(llm, core)
    failed_loads, loads = _count_failed_loads(core), _count_loads(core)
    result |= _converse(llm, args)
    device_tokens = core.scheduler.kv_cache_config.num_blocks * block
    result["ttft_ms"] = {
        length: [
            _ttft_ms(llm, args, length, i, device_tokens) for i in range(args.repeats)
        ]
        for length in args.lengths
    }
    result["failed_loads"], result["loads"] = len(failed_loads), sum(loads)
    return result


def _tokens(llm: Any, seed: int, n: int) -> list[int]:
    core = llm.llm_engine.engine_core.engine_core
    vocab = core.vllm_config.model_config.get_vocab_size()
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(n)]


def _ask(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
    )
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(batch, greedy, use_tqdm=False)


def _converse(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Conversations, some of them at a time inside the engine."""
    first = 100 * args.replica
    prompts = [_tokens(llm, first + i, args.prompt_len) for i in range(args.sessions)]
    outputs = []
    cached = []
    started = time.perf_counter()
    for turn in range(args.turns):
        answers: list[Any] = []
        for k in range(0, args.sessions, args.together):
            answers += _ask(llm, prompts[k : k + args.together], 32)
        for i in range(args.sessions):
            outputs.append(list(answers[i].outputs[0].token_ids))
            cached.append(answers[i].num_cached_tokens or 0)
            # The next prompt must not depend on this run's answer, or one flip
            # would change everything after it.
            prompts[i] = prompts[i] + _tokens(llm, 1000 * turn + first + i, 64)
    return {
        "makespan_s": time.perf_counter() - started,
        "outputs": outputs,
        "cached_tokens": sum(cached),
    }


def _ttft_ms(
    llm: Any, args: argparse.Namespace, length: int, repeat: int, device_tokens: int
) -> float:
    """Idle engine: a prefix that others have evicted, plus a new tail of 64."""
    prefix = _tokens(llm, 10_000 + length + repeat, length)
    _ask(llm, [prefix], 1)
    filler = 0
    while filler < 1.3 * device_tokens:
        n = min(args.max_len - 100, 8192)
        _ask(llm, [_tokens(llm, 20_000 + length + repeat + filler, n)], 1)
        filler += n
    time.sleep(0.2)
    prompt = prefix + _tokens(llm, 30_000 + repeat, 64)
    begun = time.perf_counter()
    _ask(llm, [prompt], 1)
    return (time.perf_counter() - begun) * 1e3


def _wait_until_open(llm: Any, core: Any) -> None:
    """Until all host slots are open: where they are not, nothing is stored."""
    pool = core.scheduler.kv_cache_manager.block_pool
    ends = time.monotonic() + OPENED_S
    while hasattr(pool, "take_stats") and time.monotonic() < ends:
        stats = pool.take_stats()
        if stats.slots_total == stats.reserved_slots:
            break
        # An engine notices in its steps.
        _ask(llm, [[3]], 1)


def _count_failed_loads(core: Any) -> list[Any]:
    """Reports of failed loads, as they reach the scheduler."""
    pool = core.scheduler.kv_cache_manager.block_pool
    found: list[Any] = []
    if hasattr(pool, "apply_report"):
        apply_report = pool.apply_report

        def apply_and_count(report: Any) -> int | None:
            void_plan = apply_report(report)
            if void_plan is not None:
                found.append(report)
            return void_plan

        pool.apply_report = apply_and_count
    return found


def _count_loads(core: Any) -> list[int]:
    """Blocks that each plan loads."""
    pool = core.scheduler.kv_cache_manager.block_pool
    found: list[int] = []
    if hasattr(pool, "take_plan"):
        take_plan = pool.take_plan

        def take_and_count(*args: Any) -> Any:
            plan = take_plan(*args)
            if plan is not None:
                found.append(len(plan.load_slots) + len(plan.ahead_slots))
            return plan

        pool.take_plan = take_and_count
    return found


class Run:
    """One configuration on one replica, in a process of its own."""

    def __init__(self, name: str, args: argparse.Namespace, replica: int) -> None:
        self.name = name
        self.label = f"{name}-{replica}" if args.dp > 1 else name
        self._path = args.out / self.label
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        command += ["--replica", str(replica), "--result", f"{self._path}.json"]
        env = os.environ | CONFIGS[name].get("env", {}) | devices(args, replica)
        with open(f"{self._path}.log", "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def result(self) -> dict[str, Any] | None:
        """What `run_config` returned; None if it failed, which is printed."""
        if not (code := self.process.wait()):
            return json.loads(Path(f"{self._path}.json").read_text())
        text = Path(f"{self._path}.log").read_text().strip().splitlines()
        print(f"{self.label}: exit {code}\n  " + "\n  ".join(text[-25:]), flush=True)
        return None


def devices(args: argparse.Namespace, replica: int) -> dict[str, str]:
    """The environment that gives a replica its GPUs; none if it has all of them."""
    if args.dp == 1:
        return {}
    size = args.tp * args.pp
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = visible.split(",") if visible else list(map(str, range(args.dp * size)))
    own = known[replica * size : (replica + 1) * size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="1b", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    alone = [name for name in CONFIGS if not name.startswith("shared")]
    parser.add_argument("--configs", default=",".join(alone))
    parser.add_argument("--device-gib", type=float, help="half of what is asked for")
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument(
        "--together",
        type=int,
        default=4,
        help="conversations at a time; the copies of one step must fit the "
        "launch queue of the device (about 1,000), or the race cannot show",
    )
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--max-len", type=int, default=20480)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="all configurations at once: as right, but times mean nothing",
    )
    parser.add_argument(
        "--llm",
        type=json.loads,
        default={},
        metavar="JSON",
        help="arguments of the engine for all configurations",
    )
    add_parallel_options(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if too_long := [n for n in args.lengths if n + 100 > args.max_len]:
        parser.error(
            f"--lengths {too_long}: prompts of so many tokens do not fit --max-len "
            f"{args.max_len}. Raise it, or give others (none: no times)."
        )
    if args.configs.split(",")[0] != "large":
        parser.error("--configs must begin with large, whose outputs are right.")
    if args.device_gib is None:
        tokens = args.sessions * (args.prompt_len + 64 * args.turns)
        itemsize = 2 if args.device == "cuda" else 4
        needed = tokens * SHAPES[args.size].kv_bytes_per_token(itemsize)
        args.device_gib = needed / 2**31
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.out / f"model-{args.size}"
    return args


def verdict(run: Run, result: dict[str, Any], right: list[list[int]]) -> bool:
    """Print what a configuration gave; whether that is as it must be.

    Args:
        run: Of which configuration, on which replica.
        result: What `run_config` returned.
        right: Outputs of the reference.

    """
    name = run.name
    outputs = result["outputs"]
    pairs = list(zip(right, outputs, strict=True))
    wrong = sum(a != b for a, b in pairs)
    ttft = "  ".join(
        f"{n}: {statistics.median(t):.1f}" for n, t in result["ttft_ms"].items()
    )
    print(
        f"{run.label:20} start {result['start_s']:5.1f} s  conversations "
        f"{result['makespan_s']:6.2f} s  cached {result['cached_tokens']:7d}  "
        f"loaded {result['loads']:6d}  "
        f"different {wrong:3d} of {len(pairs)}  distinct tokens "
        f"{len({t for out in outputs for t in out})}  TTFT ms {ttft}",
        flush=True,
    )
    good = True
    if name not in RACES and result["failed_loads"]:
        good = False
        print(f"{run.label}: {result['failed_loads']} loads failed")
    if "core" in CONFIGS[name].get("llm", {}).values() and not result["loads"]:
        good = False
        print(
            f"{run.label}: nothing was loaded, so nothing is shown: --device-gib less"
        )
    if name not in MAY_DIFFER:
        good &= wrong == 0
    elif name in RACES and not wrong:
        good = False
        print(f"{run.label}: the planted race was not noticed")
    return good


def main() -> int:
    args = arguments()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Forked ranks have what is planted here.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if args.one:
        args.result.write_text(json.dumps(run_config(args.one, args)))
        return 0

    if not (args.model / INDEX).exists():
        shape = SHAPES[args.size]
        write_model(args.model, shape, args.device, family_of(shape))
    good = True
    right: list[dict[str, Any] | None] = []
    runs = []
    for name in args.configs.split(","):
        some = [Run(name, args, replica) for replica in range(args.dp)]
        runs.append(some)
        if not args.at_once:
            for run in some:
                run.process.wait()
    for some in runs:
        results = [run.result() for run in some]
        right = right or results
        for run, result, reference in zip(some, results, right, strict=True):
            if result is None or reference is None:
                good = False
                continue
            good &= verdict(run, result, reference["outputs"])
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
