# SPDX-License-Identifier: Apache-2.0
"""How long does the tier's host memory take at start?

    python scripts/bench/host_memory.py [--gib 16] [--variants naive tier threads=4]

`naive` is `torch.empty(n, pin_memory=True)`, `tier` is what vLLM's host tier does.
Further variants change settings of the tier: `threads=N`, `gib=PIECE`, `pages=small`,
separated by commas. Every run has a process of its own. Variants take turns, and a
first run that does not count touches the memory: a virtual machine is slow to get it.

`touch` and `register` are the seconds in which at least one thread did so; they
overlap. `copy` is the rate of copies to the GPU, slot by slot. Without a GPU nothing is
pinned, and `naive` is memory that one thread touches: a rehearsal. With a GPU the
exit status is 1 if `tier` is less than three times as fast as `naive`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import torch

from vllm.v1.kv_tier.memory import buffer as host_buffer
from vllm.v1.kv_tier.memory.buffer import HostBuffer

LIMIT = 3.0
GiB = 1 << 30
COPY_BYTES = 1 * GiB

Interval = tuple[float, float]


def run(variant: str, num_bytes: int, slot_bytes: int) -> dict[str, Any]:
    """Take the memory as `variant` does, in this process, which must be fresh."""
    gpu = torch.cuda.is_available()
    if gpu:
        # The context is there before any tier starts.
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    touched: list[Interval] = []
    registered: list[Interval] = []
    available = psutil.virtual_memory().available
    memory: Any
    if variant == "naive":
        started = time.perf_counter()
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=gpu)
        if not gpu:
            torch.set_num_threads(1)
            memory.zero_()
        seconds = time.perf_counter() - started
        slots = memory.view(-1, slot_bytes)
    else:
        _time_steps(touched, registered)
        settings = _settings(variant)
        started = time.perf_counter()
        memory = HostBuffer(num_bytes // slot_bytes, slot_bytes, pin=gpu, **settings)
        seconds = time.perf_counter() - started
        slots = memory.slots
        if gpu and not memory.pinned:
            raise RuntimeError(
                f"{variant}: the driver refused to pin {num_bytes} bytes"
            )
    result = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "seconds": seconds,
        "touch": _busy(touched) if touched else None,
        "register": _busy(registered) if registered else None,
        "taken_gib": (available - psutil.virtual_memory().available) / GiB,
        "copy_gbps": _copy_rate(slots) if gpu else None,
    }
    del slots
    started = time.perf_counter()
    del memory
    result["free"] = time.perf_counter() - started
    return result


def _settings(variant: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in variant.split(",") if variant != "tier" else []:
        name, _, value = part.partition("=")
        if name == "threads":
            settings["threads"] = int(value)
        elif name == "gib":
            settings["piece_bytes"] = int(float(value) * GiB)
        elif part == "pages=small":
            settings["huge_pages"] = False
        else:
            raise ValueError(
                f"--variants: unknown setting {part!r} in {variant!r}. Use naive, "
                "tier, or threads=N, gib=PIECE, pages=small separated by commas."
            )
    return settings


def _time_steps(touched: list[Interval], registered: list[Interval]) -> None:
    """Note when each piece is touched and registered."""
    cudart = torch.cuda.cudart

    def timed(call: Callable, into: list[Interval]) -> Callable:
        def run(*args: int) -> Any:
            started = time.perf_counter()
            result = call(*args)
            into.append((started, time.perf_counter()))
            return result

        return run

    class Timed:
        def __getattr__(self, name: str) -> Any:
            call = getattr(cudart(), name)
            return timed(call, registered) if name == "cudaHostRegister" else call

    host_buffer.touch = timed(host_buffer.touch, touched)
    torch.cuda.cudart = Timed  # type: ignore[assignment]


def _busy(intervals: list[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, end = 0.0, 0.0
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _copy_rate(slots: torch.Tensor) -> float:
    """GB/s of slots to the GPU, as the tier copies them: never two at a time."""
    source = slots[: max(COPY_BYTES // slots.shape[1], 1)]
    target = torch.empty(source.shape, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for i in range(len(source)):
            target[i].copy_(source[i], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return source.numel() / min(seconds) / 1e9


def measure(args: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(variant, GiB, result) of all runs, in turns."""
    started = time.perf_counter()
    context = multiprocessing.get_context(args.start)
    slot_bytes = int(args.slot_mib * (1 << 20))

    def one(variant: str, gib: int) -> dict[str, Any]:
        num_bytes = gib * GiB // slot_bytes * slot_bytes
        # One worker, one call: gone before the next starts, and its memory with it.
        with ProcessPoolExecutor(1, context) as pool:
            result = pool.submit(run, variant, num_bytes, slot_bytes).result()
        rounded = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in result.items()
        }
        now = time.perf_counter() - started
        print(f"{now:6.1f} s  {variant}, {gib} GiB: {rounded}", file=sys.stderr)
        return rounded

    # Twice as much: a later run need not get the same pages.
    one("tier", args.warm_gib or 2 * max(args.gib))
    for _ in range(args.rounds):
        for gib in args.gib:
            for variant in args.variants:
                if time.perf_counter() - started > args.budget:
                    print("--budget is used up", file=sys.stderr)
                    return
                yield variant, gib, one(variant, gib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=int, nargs="+", default=[16])
    parser.add_argument("--variants", nargs="+", default=["naive", "tier"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slot-mib", type=float, default=2, help="of one block")
    parser.add_argument("--warm-gib", type=int, help="twice the largest if not given")
    parser.add_argument(
        "--budget", type=float, default=60, help="seconds after which no run begins"
    )
    parser.add_argument(
        "--start",
        choices=["fork", "spawn"],
        default="fork",
        help="spawn: imports vLLM for each run, which takes seconds",
    )
    args = parser.parse_args()
    for variant in args.variants:
        if variant != "naive":
            _settings(variant)

    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for variant, gib, result in measure(args):
        runs.setdefault((variant, gib), []).append(result)

    medians = {}
    for (variant, gib), results in runs.items():
        lists = {name: [result[name] for result in results] for name in results[0]}
        lists["gpu"] = results[0]["gpu"]
        medians[variant, gib] = statistics.median(lists["seconds"])
        print(json.dumps({"variant": variant, "gib": gib, **lists}))

    print(
        "\n| variant | GiB | s, min–median–max | GB/s | touch s | register s ", end=""
    )
    print("| free s | taken GiB | copy GB/s | times as fast as naive |")
    print("|---|" + "--:|" * 9)
    failed = False
    for (variant, gib), results in runs.items():
        times = [result["seconds"] for result in results]
        median = medians[variant, gib]
        ratio = medians.get(("naive", gib), float("nan")) / median
        failed |= variant == "tier" and bool(results[0]["gpu"]) and ratio < LIMIT
        cells = [
            f"{min(times):.2f}–{median:.2f}–{max(times):.2f}",
            f"{gib * GiB / median / 1e9:.1f}",
            *(_median(results, "touch"), _median(results, "register")),
            *(_median(results, "free"), _median(results, "taken_gib")),
            _median(results, "copy_gbps"),
            f"{ratio:.2f}",
        ]
        print(f"| {variant} | {gib} | {' | '.join(cells)} |")
    return int(failed)


def _median(results: list[dict[str, Any]], name: str) -> str:
    values = [result[name] for result in results if result[name] is not None]
    return f"{statistics.median(values):.2f}" if values else ""


if __name__ == "__main__":
    sys.exit(main())
