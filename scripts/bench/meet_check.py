# SPDX-License-Identifier: Apache-2.0
"""Does a request that meets its fetch in the middle gain, and is it right?

    python scripts/bench/meet_check.py --out DIR [--runner v1]

Four engines on one device, all of which start at once:

meets     Time to first token of evicted prefixes in files, whose reads are throttled;
          many requests on one evicted prefix; tokens of others beside a long prompt.
fetches   The same first tokens with `fetch: always`, where a request waits for all.
equal     A small batch-invariant model that meets: hundreds of answers.
without   The same answers of an engine without a tier.

`equal` and `without` work at once, then the other two one after the other. What is
computed alone are the first requests of `meets`, before the store has anything.
The exit status is 1 if answers differ, or fewer than half of them have jumped.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from meet_engine import TAIL, Sizes
from suite.model import SHAPES, Shape, write_config

GiB = 1 << 30
START_S = 400.0


@dataclass(frozen=True)
class Scale:
    """How large everything is; sizes of caches in GiB."""

    shape: Shape
    equal_shape: Shape
    dtype: str
    block_size: int
    batched_tokens: int
    equal_batched_tokens: int
    device_gib: float
    host_gib: float
    equal_device_gib: float
    equal_host_gib: float
    sizes: Sizes


SCALES = {
    "cuda": Scale(
        SHAPES["llama-3.1-8b"],
        SHAPES["1b"],
        "bfloat16",
        block_size=16,
        batched_tokens=8192,
        equal_batched_tokens=1024,
        device_gib=6,
        host_gib=8,
        equal_device_gib=1,
        equal_host_gib=2,
        sizes=Sizes(
            max_len=20480,
            lengths=(4096, 16384),
            num_prefixes=6,
            rates=(1, 3, 6, 12, float("inf")),
            repeats=3,
            together=50,
            together_output=192,
            decoders=16,
            equal_prefixes=40,
            equal_length=2048,
            equal_rounds=11,
            equal_output=16,
        ),
    ),
    "cpu": Scale(
        Shape(512, 1024, 8, 8, 8, 64, 1024),
        SHAPES["tiny"],
        "float32",
        block_size=32,
        batched_tokens=512,
        equal_batched_tokens=128,
        device_gib=0.0625,
        host_gib=0.125,
        equal_device_gib=1 / 512,
        equal_host_gib=1 / 256,
        sizes=Sizes(
            max_len=1536,
            lengths=(512, 1024),
            num_prefixes=6,
            rates=(1, 2, 3, 6, 12, float("inf")),
            repeats=3,
            together=6,
            together_output=16,
            decoders=4,
            equal_prefixes=12,
            equal_length=512,
            equal_rounds=4,
            equal_output=8,
        ),
    ),
}


class Child:
    """A process with an engine, which waits until it is asked to work."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self._out = name, args.out
        for old in args.out.glob(f"{name}.*"):
            old.unlink()
        job = args.out / f"{name}.job"
        job.write_text(json.dumps(make_job(name, args)))
        env = os.environ | environment(name, args)
        command = [sys.executable, str(Path(__file__).with_name("meet_engine.py"))]
        with open(args.out / f"{name}.log", "w") as log:
            self._process = subprocess.Popen(
                [*command, str(job)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                text=True,
            )

    def wait_until_ready(self) -> None:
        limit = time.monotonic() + START_S
        while not (self._out / f"{self.name}.ready").exists():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{self.name} did not start: {self._last_words()}")
            time.sleep(0.1)

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        if self._process.wait():
            raise RuntimeError(f"{self.name} failed: {self._last_words()}")
        return json.loads((self._out / f"{self.name}.json").read_text())

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        return (self._out / f"{self.name}.log").read_text()[-3000:]


def make_job(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a child is to be, and where."""
    scale = SCALES[args.device]
    is_small = name in ("equal", "without")
    shape = scale.equal_shape if is_small else scale.shape
    model = args.out / ("small" if is_small else "model")
    write_config(model, shape, scale.dtype)
    token_bytes = shape.kv_bytes_per_token(2 if scale.dtype == "bfloat16" else 4)
    sizes = scale.sizes
    device_gib = scale.equal_device_gib if is_small else scale.device_gib
    llm: dict[str, Any] = {
        "model": str(model),
        "dtype": scale.dtype,
        "block_size": scale.block_size,
        "max_model_len": sizes.max_len,
        "max_num_seqs": 64,
        "max_num_batched_tokens": (
            scale.equal_batched_tokens if is_small else args.batched_tokens
        ),
        "kv_cache_memory_bytes": int(device_gib * GiB),
        "gpu_memory_utilization": 0.1,
        "enforce_eager": args.eager or args.device == "cpu",
    }
    if is_small:
        llm["max_model_len"] = sizes.equal_length + TAIL + sizes.equal_output
    if args.device == "cpu":
        block_bytes = scale.block_size * token_bytes
        llm["num_gpu_blocks_override"] = int(device_gib * GiB) // block_bytes
    rate_file = args.out / f"{name}.rate"
    if name != "without":
        llm |= tier(name, args, rate_file, is_small)
    return {
        "name": name,
        "folder": str(args.out),
        "device": args.device,
        "llm": llm | args.llm,
        "sizes": asdict(sizes),
        "token_bytes": token_bytes,
        "rate_file": str(rate_file),
    }


def tier(
    name: str, args: argparse.Namespace, rate_file: Path, is_small: bool
) -> dict[str, Any]:
    """Arguments of an engine with a host tier and throttled files."""
    scale = SCALES[args.device]
    debug: dict[str, Any] = {"store_from_use": 1, "deadline_ms": 60_000}
    if name == "fetches":
        debug["fetch"] = "always"
    entry = {
        "type": "slow_store.SlowConfig",
        "root_dir": str(args.store / ("small" if is_small else "model")),
        "max_gib": needed_gib(scale, is_small),
        "rate_file": str(rate_file),
        "debug": debug,
    }
    config = {
        "secondary_tiers": [entry],
        "eviction_policy": "lru",
        "debug": {
            "meet": name != "fetches",
            "store_policy": "write_through",
            "store_from_use": 1,
        },
    }
    return {
        "kv_offloading_backend": "core",
        "kv_offloading_size": scale.equal_host_gib if is_small else scale.host_gib,
        "kv_offloading_config": config,
    }


def needed_gib(scale: Scale, is_small: bool) -> float:
    """Of the store: all that is computed."""
    sizes, itemsize = scale.sizes, 2 if scale.dtype == "bfloat16" else 4
    if is_small:
        num_tokens = sizes.equal_prefixes * (sizes.equal_length + 256)
        num_tokens += sizes.equal_prefixes * sizes.equal_rounds * 64
        token_bytes = scale.equal_shape.kv_bytes_per_token(itemsize)
    else:
        num_tokens = (sizes.num_prefixes + 2) * sum(sizes.lengths)
        # What is computed beside others, and the answers of many on one prefix.
        num_tokens += (1 + sizes.repeats) * max(sizes.lengths)
        each = TAIL + sizes.together_output
        num_tokens += 2 * sizes.repeats * sizes.together * each
        token_bytes = scale.shape.kv_bytes_per_token(itemsize)
    return round(1.1 * num_tokens * token_bytes / GiB + 0.5, 1)


def environment(name: str, args: argparse.Namespace) -> dict[str, str]:
    here = Path(__file__).parent
    paths = [str(here), os.environ.get("PYTHONPATH", "")]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if args.runner == "v2" else "0",
    }
    if args.device == "cpu":
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    elif name in ("equal", "without"):
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env


# ------------------------------------------------------------------------- report


def first_token_rows(
    meets: dict[str, Any], fetches: dict[str, Any]
) -> list[dict[str, Any]]:
    """Medians in milliseconds, and ratios to the better of the two others."""
    alone = {(r["length"], r["rate"]): r for r in fetches["ttft"]}
    rows = []
    for row in meets["ttft"]:
        length, rate = row["length"], row["rate"]
        times = {
            "met": row["seconds"],
            "computed": meets["computed"][str(length)],
            "fetched": alone[length, rate]["seconds"],
        }
        ms = {k: statistics.median(v) * 1e3 for k, v in times.items()}
        better = min(ms["computed"], ms["fetched"])
        rows.append(
            {"length": length, "rate": rate}
            | {f"{k}_ms": v for k, v in ms.items()}
            | {"ratio": ms["met"] / better, "of_computing": ms["met"] / ms["computed"]}
            | {"jumped_tokens": row["jumped_tokens"] / len(row["seconds"])}
            | {"overtaken_blocks": row["secondary_overtaken_blocks"]}
        )
    return rows


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is compared, for DIR/report.json; printed as well."""
    meets, equal = results["meets"], results["equal"]
    rows = first_token_rows(meets, results["fetches"])
    for r in rows:
        print(
            f"{r['length']:6d} tokens, {r['rate']:>5} GB/s: met {r['met_ms']:7.1f} ms, "
            f"computed {r['computed_ms']:7.1f}, fetched {r['fetched_ms']:7.1f}; of the "
            f"better {r['ratio']:.3f}; jumped {r['jumped_tokens']:.0f}"
        )
    parts = [r["evicted"] / r["device"] for r in meets["together"]]
    together = statistics.median(parts)
    print(f"one prefix for many: {together:.3f} of the rate on the device {parts}")
    beside = meets["beside"]
    gaps = {name: p99(beside[name]) * 1e3 for name in ("met", "computed")}
    print(
        f"p99 of gaps of others: {gaps['met']:.1f} ms beside a met prompt, "
        f"{gaps['computed']:.1f} ms beside a computed one; "
        f"{len(beside['met'])} and {len(beside['computed'])} gaps"
    )
    pairs = list(zip(equal["answers"], results["without"]["answers"], strict=True))
    wrong = sum(a != b for a, b in pairs)
    distinct = len({tuple(answer) for answer, _ in pairs})
    print(
        f"answers: {wrong} of {len(pairs)} differ, {equal['jumped']} have jumped; "
        f"{distinct} distinct"
    )
    return {
        "ttft": rows,
        "together": together,
        "p99_gap_ms": gaps,
        "answers": len(pairs),
        "differ": wrong,
        "jumped": equal["jumped"],
        "distinct": distinct,
        "start_s": {k: v["start_s"] for k, v in results.items()},
        "work_s": {k: v["work_s"] for k, v in results.items()},
        "runner_v2": meets["runner_v2"],
        "async_scheduling": meets["async_scheduling"],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=list(SCALES))
    parser.add_argument("--runner", default="v2", choices=["v1", "v2"])
    parser.add_argument("--batched-tokens", type=int)
    parser.add_argument("--eager", action="store_true", help="no graphs: starts sooner")
    parser.add_argument("--store", type=Path, help="/dev/shm if it has room, else DIR")
    parser.add_argument(
        "--llm", type=json.loads, default={}, metavar="JSON", help="of all engines"
    )
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    scale = SCALES[args.device]
    args.batched_tokens = args.batched_tokens or scale.batched_tokens
    if args.store is None:
        needed = sum(needed_gib(scale, is_small) for is_small in (False, True))
        shared = Path("/dev/shm")
        has_room = shutil.disk_usage(shared).free > (needed + 2) * GiB
        args.store = (shared if has_room else args.out) / f"meet-{os.getpid()}"
    return args


def main() -> int:
    args = arguments()
    print(f"files in {args.store}", flush=True)
    names = ("equal", "without", "meets", "fetches")
    children: dict[str, Child] = {}
    results = {}
    try:
        children = {name: Child(name, args) for name in names}
        for name in ("equal", "without"):
            children[name].begin()
        for name in ("equal", "without"):
            results[name] = children[name].result()
        for name in ("meets", "fetches"):
            children[name].wait_until_ready()
        for name in ("meets", "fetches"):
            children[name].begin()
            results[name] = children[name].result()
    finally:
        for child in children.values():
            child.end()
        shutil.rmtree(args.store, ignore_errors=True)
    found = report(results)
    (args.out / "report.json").write_text(json.dumps(found, indent=1))
    return int(found["differ"] > 0 or 2 * found["jumped"] < found["answers"])


if __name__ == "__main__":
    sys.exit(main())
