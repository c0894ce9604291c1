# SPDX-License-Identifier: Apache-2.0
"""When does an engine answer, and do its steps wait while its host memory opens?

    python scripts/bench/first_request.py --out DIR --host-gib 96
    python scripts/bench/first_request.py --out DIR --device cpu --size tiny

Starts an engine without the tier and one with it, in turns, each in a process of its
own. The first of each only compiles. Prints the seconds from the start of the process
to the first answer, and then the gaps between the tokens of eight streams, while host
slots open and after it; not again in later turns. Ends with 1 if the tier answers more
than a second later, or if a gap is above 20 ms and above the longest without the tier.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from suite.model import INDEX, SHAPES, family_of, write_model
from suite.options import parser_of

LATER_S = 1.0
GAP_MS = 20.0
STREAMS = 8


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "1b")
    add = parser.add_argument
    add("--host-gib", type=float, default=96)
    add("--device-gib", type=float, default=8)
    add("--repeats", type=int, default=2)
    add("--only", choices=["none", "core"])
    add("--watch-s", type=float, default=120, help="seconds of streams, at most")
    add("--still-s", type=float, default=5, help="seconds of streams without opening")
    add("--tier", type=json.loads, default={}, metavar="JSON", help="its settings")
    add("--llm", type=json.loads, default={}, metavar="JSON", help="engine arguments")
    add("--one", choices=["none", "core"], help=argparse.SUPPRESS)
    add("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.out / f"model-{args.size}"
    return args


@dataclass
class Gaps:
    """Milliseconds between the tokens of a stream."""

    opening: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.opening

    def summary(self) -> dict[str, Any]:
        """How many there are, their median and the longest."""
        return {
            name: {
                "num": len(gaps),
                "median_ms": statistics.median(gaps),
                "above": sum(gap > GAP_MS for gap in gaps),
                "longest_ms": sorted(gaps)[-20:],
            }
            for name, gaps in (("opening", self.opening), ("after", self.after))
            if gaps
        }


async def stream(engine: Any, name: str, gaps: Gaps, until: asyncio.Event) -> None:
    """Add the gaps of requests that follow each other to `gaps.now`."""
    number = 0
    while not until.is_set():
        number += 1
        before = None
        async for _ in ask(engine, f"{name}-{number}", 1500):
            now = time.perf_counter()
            if before is not None:
                gaps.now.append((now - before) * 1e3)
            before = now
            if until.is_set():
                break


def ask(engine: Any, name: str, max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompt = {"prompt_token_ids": [3 + (7 * i) % 900 for i in range(32)]}
    return engine.generate(prompt, how, name)


def open_slots() -> tuple[float, float]:
    """Host slots that are open, and that there will be; (0, 0) without the tier."""
    from prometheus_client import REGISTRY

    names = [f"vllm:kv_tier_{which}_slots" for which in ("host", "reserved")]
    # All metrics would take longer than a step.
    found = {
        sample.name: sample.value
        for metric in REGISTRY.restricted_registry(names).collect()
        for sample in metric.samples
    }
    return found.get(names[0], 0.0), found.get(names[1], 0.0)


async def run_one(args: argparse.Namespace) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tier: dict[str, Any] = {
        "kv_offloading_backend": "core",
        "kv_offloading_size": args.host_gib,
        "kv_offloading_config": args.tier,
    }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(args.model),
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=32,
            kv_cache_memory_bytes=int(args.device_gib * 2**30),
            **(tier if args.one == "core" else {}),
            **args.llm,
        )
    )
    try:
        ready_s = time.time() - args.since
        async for _ in ask(engine, "first", 1):
            pass
        first_s = time.time() - args.since
        result = {"ready_s": ready_s, "first_s": first_s}
        return result | await watch(engine, args) if args.watch_s else result
    finally:
        engine.shutdown()


async def watch(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps between tokens while slots open, and for a while after it."""
    # Graphs and kernels of eight requests have run once before gaps count.
    await asyncio.gather(*(drain(ask(engine, f"w{i}", 16)) for i in range(STREAMS)))
    gaps, until = Gaps(), asyncio.Event()
    tasks = [
        asyncio.create_task(stream(engine, f"s{i}", gaps, until))
        for i in range(STREAMS)
    ]
    begun = time.monotonic()
    opened_s = None
    while (passed := time.monotonic() - begun) < args.watch_s:
        here, reserved = open_slots()
        if opened_s is None and here == reserved:
            opened_s, gaps.now = passed, gaps.after
        if opened_s is not None and passed > opened_s + args.still_s:
            break
        await asyncio.sleep(0.25)
    until.set()
    await asyncio.gather(*tasks)
    return {"opened_s": opened_s, "slots": open_slots(), "gaps": gaps.summary()}


async def drain(answers: Any) -> None:
    async for _ in answers:
        pass


def runs(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for repeat in range(-1, args.repeats):
        pair = ("none", "core") if repeat % 2 == 0 else ("core", "none")
        yield from ((name, repeat) for name in pair if args.only in (None, name))


def start(args: argparse.Namespace, name: str, repeat: int) -> dict[str, Any] | None:
    """What a run measured; None if it failed, which is printed."""
    log = args.out / f"{name}-{repeat}.log"
    command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
    if repeat:
        command += ["--watch-s", "0"]
    command += ["--since", str(time.time())]
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output).returncode
    text = log.read_text()
    if code:
        print(f"{name} {repeat}: exit {code}\n{text[-2500:]}", flush=True)
        return None
    result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    print(
        f"{name:5} {repeat:2}: ready {result['ready_s']:.2f} s, first answer "
        f"{result['first_s']:.2f} s"
        + (f", open after {result['opened_s']} s" if "opened_s" in result else ""),
        flush=True,
    )
    for when, gaps in result.get("gaps", {}).items():
        longest = ", ".join(f"{gap:.1f}" for gap in gaps["longest_ms"][-4:])
        print(
            f"    {when}: {gaps['num']} gaps, median {gaps['median_ms']:.2f} ms, "
            f"{gaps['above']} above {GAP_MS:.0f} ms, longest {longest} ms",
            flush=True,
        )
    with (args.out / "results.jsonl").open("a") as lines:
        lines.write(json.dumps({"config": name, "repeat": repeat} | result) + "\n")
    return result


def longest_ms(results: list[dict[str, Any]]) -> float:
    """The longest gap of some runs."""
    return max(
        (
            gaps["longest_ms"][-1]
            for result in results
            for gaps in result.get("gaps", {}).values()
        ),
        default=0.0,
    )


def main() -> int:
    args = arguments()
    if args.one:
        print(json.dumps(asyncio.run(run_one(args))), flush=True)
        # Threads of a client may still wait.
        os._exit(0)
    if not (args.model / INDEX).exists():
        shape = SHAPES[args.size]
        write_model(args.model, shape, args.device, family_of(shape))
    of: dict[str, list[dict[str, Any]]] = {"none": [], "core": []}
    for name, repeat in runs(args):
        result = start(args, name, repeat)
        if result is not None and repeat >= 0:
            of[name].append(result)
    if not of["none"] or not of["core"]:
        return 1
    first = {n: statistics.median(r["first_s"] for r in some) for n, some in of.items()}
    longest = {name: longest_ms(some) for name, some in of.items()}
    later_s = first["core"] - first["none"]
    print(
        f"The tier answers {later_s:.2f} s later (at most {LATER_S}); longest gap "
        f"{longest['core']:.1f} ms, without the tier {longest['none']:.1f} ms"
    )
    return int(later_s > LATER_S or longest["core"] > max(GAP_MS, longest["none"]))


if __name__ == "__main__":
    sys.exit(main())
