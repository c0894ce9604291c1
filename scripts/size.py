# SPDX-License-Identifier: Apache-2.0
"""How much host memory is worth it: hit rates that a trace of requests would have had.

    make size ARGS='--model config.json --device-gib 100 --trace trace.jsonl'

Runs the tier's own block pool through the trace, for each host size, eviction policy
and store policy, and each store below the host (`--below-gib`). Writes size.json and
size.png, and prints tables.
"""

import argparse
import gc
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tqdm import tqdm

from sizing import replay as replay_module
from sizing.below import DEADLINE_MS, STORE_FROM_USE, Below
from sizing.flood import flooded
from sizing.kv_bytes import ITEM_BYTES, kv_bytes_per_token
from sizing.picture import draw
from sizing.pod import PERIOD_S, memory_gib, startup_failures
from sizing.replay import Engine, GiB, Outcome, Tier, replay
from sizing.shift import Work, agents, shifted
from sizing.trace import (
    ID_TOKENS,
    NOBODY,
    Senders,
    read_trace,
    unbounded_hit_rate,
)
from vllm.v1.kv_tier.config import StorePolicy
from vllm.v1.kv_tier.policy import POLICIES, make_policy
from vllm.v1.kv_tier.releases import keys_are_bytes

FromUse = int | Literal["auto"]
SIZES = (0, 16, 32, 64, 128, 256, 512, 1024)


def tiers(
    sizes_gib: Sequence[float],
    policies: Sequence[str],
    stores: Sequence[StorePolicy],
    from_uses: Sequence[FromUse] = (1,),
    senders: Senders = NOBODY,
    quotas: Sequence[float] = (0.0,),
    stores_below: Sequence[Below | None] = (None,),
) -> list[Tier]:
    """What to try, the longest first. Without a tier there is one case."""
    cases = []
    for size in sorted(set(sizes_gib), reverse=True):
        if size == 0:
            cases.append(Tier(0))
            continue
        num_bytes = int(size * GiB)
        cases += [
            Tier(num_bytes, policy, store, from_use, senders, below, quota)
            for policy in policies
            for store in stores
            for from_use in from_uses
            for quota in quotas
            for below in stores_below
        ]
    return cases


def replay_all(
    engine: Engine, cases: Sequence[Tier], served: Work, jobs: int
) -> list[Outcome]:
    """Every case through the trace, `jobs` at a time, in the order of `cases`."""
    found: dict[Tier, Outcome] = {}
    # Forked: imports of vLLM take longer than a case. What is there already is left
    # alone by the garbage collection of the children.
    gc.freeze()
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = [
                pool.submit(replay, engine, case, served.calls, served.num_before)
                for case in cases
            ]
            for future in tqdm(as_completed(futures), total=len(cases), unit="case"):
                outcome = future.result()
                found[outcome.tier] = outcome
    finally:
        # What is frozen is not collected at the end either, and Triton's bindings
        # would list all of it as leaked.
        gc.unfreeze()
    return [found[case] for case in cases]


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: hit rate of the device + of the host + of what is below it, in % of the
    prompt blocks."""
    sizes = sorted({o.tier.host_bytes for o in outcomes})
    labels = list(dict.fromkeys(o.tier.label for o in outcomes if o.tier.host_bytes))
    cells = {}
    for o in outcomes:
        rates = [o.device_rate, o.host_rate, *([o.below_rate] if o.traffic else [])]
        text = " + ".join(f"{100 * rate:.1f}" for rate in rates)
        cells[o.tier.label, o.tier.host_bytes] = text
    lines = [
        ["GiB", *(f"{size / GiB:g}" for size in sizes)],
        ["---"] * (len(sizes) + 1),
    ]
    for label in labels or ["none"]:
        row = [cells[label if size else "none", size] for size in sizes]
        lines.append([label, *row])
    return _markdown(lines)


def work(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what stores below the host would have had to do; empty without one."""
    lines = [
        ["below", "GiB", "read", "written", "dropped, % of writes", "late requests"],
        ["---"] * 6,
    ]
    for o in outcomes:
        if (t := o.traffic) is None:
            continue
        pairs = (
            (t.read_bytes, t.read_bytes_per_s),
            (t.written_bytes, t.written_bytes_per_s),
        )
        rates = [f"{n / t.seconds / 1e9:.2f} ({most / 1e9:.2f})" for n, most in pairs]
        due = max(1, t.written_bytes + t.dropped_bytes)
        dropped = f"{100 * t.dropped_bytes / due:.1f}"
        size = f"{o.tier.host_bytes / GiB:g}"
        lines.append([o.tier.label, size, *rates, dropped, str(t.late_requests)])
    return _markdown(lines) if len(lines) > 2 else ""


def _print_tables(outcomes: Sequence[Outcome]) -> None:
    done = work(outcomes)
    below = " + below it" if done else ""
    print(f"\nHits on the device + on the host{below}, % of the prompt blocks:\n")
    print(table(outcomes))
    if done:
        print(f"\nWork of the store, GB/s: mean (busiest minute):\n\n{done}")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def together(engine: Engine, num_engines: int) -> Engine:
    """Engines that share a pool, as one: no pool has more hits."""
    return replace(
        engine,
        device_bytes=engine.device_bytes * num_engines,
        prefill_tokens_per_s=engine.prefill_tokens_per_s * num_engines,
        max_running=engine.max_running * num_engines,
        link_bytes_per_s=engine.link_bytes_per_s * num_engines,
    )


def of_one(served: Work, num_engines: int) -> Work:
    """What one of several engines gets of a router that draws."""
    rng = random.Random(0)
    is_its = [rng.randrange(num_engines) == 0 for _ in served.calls]
    calls = tuple(call for call, its in zip(served.calls, is_its) if its)
    return Work(calls, sum(is_its[: served.num_before]))


def _print_separate(args: argparse.Namespace, engine: Engine) -> None:
    num = args.engines
    sizes = [size / num for size in args.host_gib]
    cases = tiers(sizes, args.eviction_policy, args.store_policy, args.store_from_use)
    outcomes = replay_all(engine, cases, of_one(args.work, num), args.jobs)
    print(
        f"\nThe above is the most that {num} engines with one pool can have. With "
        f"separate tiers, each with 1/{num} of the requests and of the GiB:\n"
    )
    print(table(outcomes))


def pods(sizes_gib: Sequence[float], base_gib: float, start_s: float) -> str:
    """Markdown: what a container needs for each size."""
    probe = f"startupProbe, each {PERIOD_S} s: failureThreshold"
    rows = [f"| --kv-offloading-size | memory | {probe} |", "|---|---|---|"]
    for size in sorted(set(sizes_gib) - {0}):
        memory, failures = memory_gib(size, base_gib), startup_failures(size, start_s)
        rows.append(f"| {size:g} | {memory}Gi | {failures} |")
    return "\n".join(rows)


def _add_below(add: Callable[..., Any]) -> None:
    add("--below-gib", type=float, nargs="+", default=[0.0], metavar="GIB")
    add("--below-read-gb-s", type=float, default=6.0, metavar="GB/S")
    add("--below-write-gb-s", type=float, default=3.0, metavar="GB/S")
    add("--below-latency-ms", type=float, default=1.0, metavar="MS")
    add("--below-deadline-ms", type=float, default=DEADLINE_MS, metavar="MS")
    add("--below-store-from-use", type=int, default=STORE_FROM_USE, metavar="N")


def stores_below(args: argparse.Namespace) -> list[Below | None]:
    """The stores to try, the largest first; None: no store."""
    return [
        Below(
            int(size * GiB),
            args.below_read_gb_s * 1e9,
            args.below_write_gb_s * 1e9,
            args.below_latency_ms / 1e3,
            args.below_store_from_use,
            args.below_deadline_ms / 1e3,
        )
        if size
        else None
        for size in sorted(set(args.below_gib), reverse=True)
    ]


def _from_use(text: str) -> FromUse:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be auto or a number from 1, got {text}")
    return number


def _work(args: argparse.Namespace) -> Work:
    """The trace, behind what runs before it.

    Raises:
        OSError, ValueError: Of a trace, or a number is wrong.

    """
    calls, part = read_trace(args.trace), args.before_part
    if args.before is not None:
        return shifted(read_trace(args.before), calls)
    if args.before_agents is not None:
        if args.before_agents < 1:
            raise ValueError(f"--before-agents {args.before_agents} is below 1")
        return shifted(agents(args.before_agents), calls)
    if part is None:
        return shifted([], calls)
    cut = round(part * len(calls))
    if not 0 < cut < len(calls):
        raise ValueError(f"--before-part {part:g} leaves nothing on one of its sides")
    return shifted(calls[:cut], calls[cut:])


def _check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    above_0 = (
        "device_gib prefill_tokens_per_s tp max_num_seqs jobs link_gb_s engines "
        "below_read_gb_s below_write_gb_s below_deadline_ms below_store_from_use"
    )
    for name in above_0.split():
        if not getattr(args, name) > 0:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be above 0, got {getattr(args, name)}")
    parts = {
        "--releasing": [args.releasing],
        "--release-wrong": [args.release_wrong],
        "--quota": args.quota,
    }
    for flag, values in parts.items():
        for value in values:
            if not 0 <= value <= 1:
                parser.error(f"{flag} must be from 0 to 1, got {value}")
    from_0 = {
        "--host-gib": args.host_gib,
        "--below-gib": args.below_gib,
        "--below-latency-ms": [args.below_latency_ms],
        "--flood": [args.flood],
    }
    for flag, values in from_0.items():
        if min(values) < 0:
            parser.error(f"{flag} {min(values):g} is below 0")
    if max(args.below_gib) and not keys_are_bytes():
        parser.error(
            "--below-gib: this release of vLLM has no tier below the host, since its "
            "block hashes are numbers of one process"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="size",
        description=f"{__doc__}\n{replay_module.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="JSON lines of the Mooncake traces")
    add("--model", type=Path, help="config.json of a model, or its folder")
    add("--kv-bytes-per-token", type=int, help="of all ranks; instead of --model")
    add("--kv-cache-dtype", choices=["auto", *ITEM_BYTES], default="auto")
    add("--tp", type=int, default=1, help="tensor parallel size, for --model")
    add("--device-gib", type=float, required=True, help="KV cache of all ranks")
    add("--engines", type=int, default=1, help="of a node; --device-gib is of each")
    add("--host-gib", type=float, nargs="+", default=SIZES, metavar="GIB")
    add("--eviction-policy", nargs="+", default=list(POLICIES), metavar="POLICY")
    stores = list(get_args(StorePolicy))
    add("--store-policy", nargs="+", choices=stores, default=stores)
    add("--store-from-use", type=_from_use, nargs="+", default=["auto"], metavar="N")
    add("--releasing", type=float, default=0.0, metavar="PART", help="of the clients")
    add(
        "--release-wrong",
        type=float,
        default=0.0,
        metavar="PART",
        help="of what they say",
    )
    add("--flood", type=float, default=0.0, metavar="TIMES", help="as many tokens")
    add(
        "--quota", type=float, nargs="+", default=[0.0], metavar="PART", help="no flood"
    )
    _add_below(add)
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--before", type=Path, help="a trace that runs before")
    before.add_argument("--before-agents", type=int, metavar="N", help="agents")
    before.add_argument(
        "--before-part", type=float, metavar="PART", help="of the trace; other ids then"
    )
    add("--block-size", type=int, default=ID_TOKENS, help=f"divides {ID_TOKENS}")
    add("--prefill-tokens-per-s", type=float, default=33_000, metavar="TOKENS")
    add("--link-gb-s", type=float, default=50.0, help="GB/s from host to device")
    add("--itl-ms", type=float, default=6.0, help="milliseconds an output token")
    add("--max-num-seqs", type=int, default=256, help="requests that run at once")
    add("--jobs", type=int, default=multiprocessing.cpu_count())
    add("--base-gib", type=float, default=20.0, help="memory of a pod without a tier")
    add("--start-s", type=float, default=600.0, help="start of a pod without a tier")
    add("--out", type=Path, default=Path("build/size"))
    args = parser.parse_args()
    if (args.model is None) == (args.kv_bytes_per_token is None):
        parser.error("give either --model or --kv-bytes-per-token")
    if not 1 <= args.block_size <= ID_TOKENS or ID_TOKENS % args.block_size:
        parser.error(f"--block-size {args.block_size} does not divide {ID_TOKENS}")
    _check_numbers(parser, args)
    try:
        for policy in args.eviction_policy:
            make_policy(policy, 1)
        args.work = flooded(_work(args), args.flood)
        args.note = ""
        if args.model is not None:
            args.kv_bytes_per_token, args.note = kv_bytes_per_token(
                args.model, args.tp, args.kv_cache_dtype
            )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    started = time.monotonic()
    engine = Engine(
        args.block_size,
        args.kv_bytes_per_token * args.block_size,
        int(args.device_gib * GiB),
        args.prefill_tokens_per_s,
        args.itl_ms / 1e3,
        args.max_num_seqs,
        args.link_gb_s * 1e9,
    )
    unbounded = unbounded_hit_rate(args.work.counted, args.block_size)
    cases = tiers(
        args.host_gib,
        args.eviction_policy,
        args.store_policy,
        args.store_from_use,
        Senders(args.releasing, args.release_wrong),
        args.quota,
        stores_below(args),
    )
    print(
        f"{len(args.work.counted):,} requests, {args.kv_bytes_per_token:,} bytes of KV "
        f"a token, blocks of {args.block_size} tokens; {args.device_gib:g} GiB on the "
        "device.\n"
        f"An unbounded cache has {unbounded:.1%} of the prompt blocks."
    )
    if args.note:
        print(f"Note: {args.note}.")
    whole = together(engine, args.engines)
    outcomes = replay_all(whole, cases, args.work, args.jobs)
    wall_s = time.monotonic() - started
    both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(who) for who in both]
    cpu_s = sum(u.ru_utime + u.ru_stime for u in used)
    _print_tables(outcomes)
    if args.engines > 1:
        _print_separate(args, engine)
    pod = f"{args.base_gib:g} GiB and {args.start_s:g} s by itself"
    print(f"\nA pod that needs {pod}:\n")
    print(pods(args.host_gib, args.base_gib, args.start_s))
    if too_long := max(o.too_long for o in outcomes):
        print(f"\n{too_long} requests do not fit the device and were left out.")
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "trace": args.trace.name,
        "requests": len(args.work.counted),
        "requests_before": args.work.num_before,
        "flood": args.flood,
        "kv_bytes_per_token": args.kv_bytes_per_token,
        "note": args.note,
        "engine": asdict(whole),
        "unbounded_hit_rate": unbounded,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "outcomes": [outcome.as_json() for outcome in outcomes],
    }
    (args.out / "size.json").write_text(json.dumps(result, indent=1) + "\n")
    title = (
        f"{args.trace.stem}: {len(args.work.counted):,} requests, "
        f"{args.kv_bytes_per_token / 1024:g} KiB of KV a token, "
        f"{args.device_gib * args.engines:g} GiB on the device"
    )
    draw(outcomes, unbounded, title, args.out / "size.png")
    print(
        f"\n{len(cases)} cases in {wall_s:.0f} s, {cpu_s:.0f} s of CPU. "
        f"Wrote {args.out / 'size.json'} and {args.out / 'size.png'}.\n"
        "What is modelled and what is not: --help."
    )


if __name__ == "__main__":
    main()
