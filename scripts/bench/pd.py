# SPDX-License-Identifier: Apache-2.0
"""Prefill on one GPU, decode on another, NixlConnector between them: with the tier?

    python scripts/bench/pd.py --out DIR
    python scripts/bench/pd.py --out DIR --device cpu --size tiny

Conversations that outgrow the device cache of either engine are asked of pairs without
the tier, with it on both sides and on the prefill side only, and of one engine without
pair and tier whose device cache holds everything: `one`, whose answers are right. All
engines are there at once; each repeat asks all of them for the same, one after the
other, each time in another order.

In `race` copies are late and nobody waits for them, which the answers must show (not
on CPUs, whose copies are over when they begin). `--batch-invariant` takes rounding
out of the answers; without it, on a GPU, some may differ that are not wrong.

Ends with 1 if answers differ, nothing came from a host that should have, a transfer or
a copy failed, or something was not reached within the time limit.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from suite.client import Answer
from suite.engines import PLANTS, Alone, Asked, Engine, Pair, free_port
from suite.handovers import COUNTS, FAILURES, GIB, Cell, differing, line, table
from suite.jobs import UTILIZATION
from suite.model import SHAPES, write_config
from suite.options import parser_of
from suite.workloads import tokens

REFERENCE, RACE = "one", "race"
CONFIGS: dict[str, tuple[bool, bool, str]] = {
    "without": (False, False, ""),
    "both": (True, True, ""),
    "prefill": (True, False, ""),
    RACE: (True, True, "delay_copies,remove_fences"),
}
"""Pairs: whether prefill and decode engine have the tier, and what is planted."""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "1b")
    add = parser.add_argument
    add("--configs", help=f"of {','.join(CONFIGS)}; all, on a CPU without race")
    add("--batch-invariant", action="store_true", help="answers must be equal")
    add("--device-gib", type=float, help="device cache; a third of all conversations")
    add("--host-gib", type=float, help="of each tier; twice all conversations")
    add("--block-size", type=int, default=64)
    add("--sessions", type=int, default=16)
    add("--at-once", type=int, default=4, help="conversations under way")
    add("--turns", type=int, default=4)
    add("--prompt-len", type=int, default=6144)
    add("--more", type=int, default=256, help="tokens that a turn adds")
    add("--max-tokens", type=int, default=32)
    add("--repeats", type=int, default=3)
    add("--llm", type=json.loads, default={}, help="arguments of all engines, as JSON")
    add("--time-limit", type=float, default=400.0, help="seconds")
    args = parser.parse_args()
    known = [name for name in CONFIGS if args.device == "cuda" or name != RACE]
    args.configs = args.configs.split(",") if args.configs else known
    if unknown := {*args.configs} - {*known}:
        parser.error(f"--configs: no {', '.join(unknown)}; use some of {known}.")
    itemsize = 2 if args.device == "cuda" else 4
    longest = args.prompt_len + args.turns * args.more
    size = SHAPES[args.size].kv_bytes_per_token(itemsize) * args.sessions * longest
    args.all_bytes = size
    args.device_gib = args.device_gib or size / 3 / GIB
    args.host_gib = args.host_gib or 2 * size / GIB
    args.max_len = longest + args.max_tokens + args.block_size
    return args


class Engines:
    """All that run at once; ends them when it is left.

    Args:
        args: Of the command line.
        ends: When they must be there, by the clock of `time.monotonic`.

    """

    def __init__(self, args: argparse.Namespace, ends: float) -> None:
        self._args = args
        self._ends = ends
        self._stack = ExitStack()
        self._sockets = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._model = args.out / f"model-{args.size}"
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        write_config(self._model, SHAPES[args.size], dtype)
        self._llm = {
            "model": str(self._model),
            "dtype": dtype,
            "block_size": args.block_size,
            "max_model_len": args.max_len,
            "max_num_seqs": 32,
            "enforce_eager": args.device == "cpu",
        }
        if args.device == "cuda":
            sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
            self._llm |= {"compilation_config": sizes}
            self._llm["gpu_memory_utilization"] = UTILIZATION

    def __enter__(self) -> dict[str, Asked]:
        """The reference and the pairs by name, ready; who did not start is left out."""
        try:
            # What the first ones compile, the others find.
            first: dict[str, Asked] = {REFERENCE: self._alone()}
            plain = [name for name in self._args.configs if not CONFIGS[name][0]]
            first |= {name: self._pair(name) for name in plain}
            found = self._ready(first)
            others = [name for name in self._args.configs if name not in plain]
            return found | self._ready({name: self._pair(name) for name in others})
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _alone(self) -> Alone:
        llm = {"kv_cache_memory_bytes": int(1.2 * self._args.all_bytes)}
        return Alone(self._start(REFERENCE, 1, llm, ""))

    def _pair(self, name: str) -> Pair:
        *tiers, plants = CONFIGS[name]
        roles = ("producer", "consumer")
        engines = []
        for device, (role, tier) in enumerate(zip(roles, tiers, strict=True)):
            transfer: dict[str, Any] = {
                "kv_connector": "NixlConnector",
                "kv_role": f"kv_{role}",
                "kv_buffer_device": self._args.device,
                # A failed transfer must show, in a test of it.
                "kv_load_failure_policy": "fail",
            }
            llm: dict[str, Any] = {
                "kv_cache_memory_bytes": int(self._args.device_gib * GIB),
                "kv_transfer_config": transfer,
            }
            if tier:
                llm |= {
                    "kv_offloading_backend": "core",
                    "kv_offloading_size": self._args.host_gib,
                }
            # Times on CPUs mean little; with what upstream does there, nothing.
            some = ["bind_no_worker"] * (self._args.device == "cpu")
            some += [plants] * tier
            engines.append(self._start(f"{name}-{role}", device, llm, ",".join(some)))
        return Pair(*engines)

    def _start(
        self, name: str, device: int, llm: dict[str, Any], plants: str
    ) -> Engine:
        args = self._args
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            # Says which transports it takes.
            "UCX_LOG_LEVEL": "info",
            PLANTS: plants,
        }
        if args.device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = str(device)
        if args.batch_invariant:
            env["VLLM_BATCH_INVARIANT"] = "1"
        llm = self._llm | llm | args.llm
        engine = Engine(name, llm, env, args.out, self._sockets)
        self._stack.callback(engine.end)
        return engine

    def _ready(self, some: dict[str, Asked]) -> dict[str, Asked]:
        found = {}
        for name, asked in some.items():
            try:
                for engine in asked.engines:
                    took = engine.wait(self._ends)
                    print(f"{engine.name:18} ready in {took:5.1f} s", flush=True)
                    for said in notes(engine.log):
                        print(f"{engine.name:18}   {said}", flush=True)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            asked.pause()
            found[name] = asked
        return found


def notes(log: Path) -> list[str]:
    """What an engine said of its tier, and of the transports that it has taken."""
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    found = [line.partition("KV tier:")[2] for line in lines if "KV tier:" in line]
    names = ("cuda_ipc", "cuda_copy", "rc_mlx5", "cma", "sysv", "posix", "tcp")
    lanes = [line for line in lines if "intra-node" in line]
    taken = [
        name
        for name in names
        if any(f"({name}/" in x or f" {name}/" in x for x in lanes)
    ]
    return [line.strip() for line in found] + [f"UCX: {' '.join(taken)}"] * bool(taken)


async def converse(asked: Asked, args: argparse.Namespace, repeat: int) -> list[Answer]:
    """Conversations, some at a time; all of a turn before the next one.

    No prompt depends on an answer: one flip would change everything after it.
    """
    vocab = SHAPES[args.size].vocab
    gate = asyncio.Semaphore(args.at_once)
    prompts = [
        tokens(vocab, args.prompt_len, "pd", repeat, i) for i in range(args.sessions)
    ]

    async def ask(turn: int, i: int) -> Answer:
        async with gate:
            return await asked.ask(f"{turn}-{i}", prompts[i], args.max_tokens)

    answers: list[Answer] = []
    for turn in range(args.turns):
        answers += await asyncio.gather(*(ask(turn, i) for i in range(args.sessions)))
        for i, prompt in enumerate(prompts):
            prompt += tokens(vocab, args.more, "pd", repeat, i, turn)
    return answers


async def run_cell(
    config: str, asked: Asked, args: argparse.Namespace, repeat: int
) -> Cell:
    before = [await engine.count() for engine in asked.engines]
    cell = Cell(config, repeat, await converse(asked, args, repeat))
    for engine, old in zip(asked.engines, before, strict=True):
        new = await engine.count()
        found = {key: new.get(n, 0) - old.get(n, 0) for key, n in COUNTS.items()}
        cell.counts.append(found | {k: new.get(n, 0) for k, n in FAILURES.items()})
    return cell


async def measure(
    args: argparse.Namespace, all_: dict[str, Asked], cells: list[Cell]
) -> None:
    """Add all cells, in turns; each is written at once. Who fails is asked no more."""
    names = list(all_)
    # Whatever is set up at its first use; and device caches that are full.
    turns = [(args.repeats, names)]
    for repeat in range(args.repeats):
        first = repeat % max(len(names), 1)
        turns.append((repeat, names[first:] + names[:first]))
    failed = set()
    for repeat, some in turns:
        warm_up = repeat == args.repeats
        for name in some:
            if name in failed or (name == RACE and repeat and not warm_up):
                continue
            try:
                async with all_[name].alone():
                    cell = await run_cell(name, all_[name], args, repeat)
            except (RuntimeError, OSError) as error:
                print(f"{name}: {error}", flush=True)
                failed.add(name)
                continue
            print(f"{line(cell)}{'  (warm-up)' * warm_up}", flush=True)
            if not warm_up:
                cells.append(cell)
                with (args.out / "pd.jsonl").open("a") as file:
                    file.write(json.dumps(cell.record()) + "\n")


def verdict(args: argparse.Namespace, cells: list[Cell]) -> list[str]:
    """What is not as it must be."""
    wrong = []
    exact = args.batch_invariant or args.device == "cpu"
    right = {c.repeat: c for c in cells if c.config == REFERENCE}
    for name in args.configs:
        mine = [c for c in cells if c.config == name and c.repeat in right]
        wanted = 1 if name == RACE else args.repeats
        if len(mine) < wanted:
            wrong.append(f"{name}: {len(mine)} of {wanted} repeats were reached")
        num, total = differing(mine, right), sum(len(c.answers) for c in mine)
        print(f"{name:10} {num} of {total} answers differ")
        if name == RACE:
            if mine and not num:
                wrong.append("race: the planted race was not noticed")
            continue
        if num and exact:
            wrong.append(f"{name}: {num} answers differ")
        for i, role in enumerate(("prefill", "decode")):
            if CONFIGS[name][i] and not sum(c.counts[i]["host"] for c in mine):
                wrong.append(f"{name}: the {role} side found nothing on its host")
            for what in FAILURES:
                if mine and (count := mine[-1].counts[i][what]):
                    wrong.append(f"{name}: {count:.0f} {what} of the {role} side")
        if not sum(c.counts[1]["bytes"] for c in mine):
            wrong.append(f"{name}: nothing was passed on")
    return wrong


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.time_limit
    print(
        f"{args.sessions} conversations: {args.all_bytes / GIB:.3g} GiB of KV, device "
        f"caches of {args.device_gib:.3g}, hosts of {args.host_gib:.3g} GiB",
        flush=True,
    )
    cells: list[Cell] = []
    with Engines(args, ends) as all_:
        left = ends - time.monotonic()
        try:
            asyncio.run(asyncio.wait_for(measure(args, all_, cells), left))
        except TimeoutError:
            print("The time limit was reached.", flush=True)
        for asked in all_.values():
            for engine in asked.engines:
                print(f"{engine.name}: {'; '.join(notes(engine.log)[-1:])}")
    print(table(cells))
    wrong = verdict(args, cells)
    print("\n".join(wrong) or "All is as it must be.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
