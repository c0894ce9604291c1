# SPDX-License-Identifier: Apache-2.0
"""Two engines behind a random router: one pool against separate tiers.

    python scripts/bench/pool.py --model Qwen/Qwen3-8B --out DIR --gpus 0,1
    python scripts/bench/pool.py --model FOLDER --out DIR --device cpu --host-gib 0.05 \
        --device-gib 0.01 --first 160 --turn 64 --clients 4 --conversations 12

Every turn of a conversation repeats all tokens before it and goes to an engine drawn at
random. Both configurations have the same host memory in sum, are asked the same, and
run one after the other. The model needs weights in files: they are a part of what names
its KV. Prints requests per second and the part of the prompt tokens that were cached.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

START_S = 900


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True)
    add("--out", type=Path, required=True)
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--gpus", default="0,1", help="one for each engine")
    add("--host-gib", type=float, default=64, help="of all engines together")
    add("--device-gib", type=float, default=8, help="KV cache of each engine")
    add("--conversations", type=int, default=200)
    add("--turns", type=int, default=5)
    add("--first", type=int, default=4000, help="tokens of the first prompt")
    add("--turn", type=int, default=420, help="tokens that each turn adds")
    add("--answer", type=int, default=32, help="tokens of an answer")
    add("--clients", type=int, default=16)
    add("--configs", default="separate,pool")
    add("--repeats", type=int, default=1)
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Process:
    """A process whose group is killed at the end."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self.log = log

    def check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"it ended:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_keeper(args: argparse.Namespace, folder: Path, num_engines: int) -> Process:
    command = [sys.executable, "-m", "vllm.v1.kv_tier.keeper"]
    command += ["--socket", str(folder / "pool.sock")]
    command += ["--size", str(args.host_gib), "--engines", str(num_engines)]
    keeper = Process(command, folder / "keeper.log", dict(os.environ))
    until = time.monotonic() + START_S
    while "partitions of" not in keeper.log.read_text():
        keeper.check()
        if time.monotonic() > until:
            raise RuntimeError("the keeper is not ready")
        time.sleep(0.2)
    return keeper


def start_engine(
    args: argparse.Namespace, folder: Path, gpu: str, pool: Path | None, part: float
) -> tuple[Process, str]:
    """A server, and its address."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(int(args.device_gib * (1 << 30)))]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    command += ["--kv-offloading-backend", "core"]
    if pool is None:
        command += ["--kv-offloading-size", str(part)]
    else:
        command += ["--kv-offloading-config", json.dumps({"pool": str(pool)})]
    env = dict(os.environ) | {"PYTHONHASHSEED": "0"}
    if args.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = gpu
    log = folder / f"engine{gpu}.log"
    return Process(command, log, env), f"http://127.0.0.1:{port}"


def wait_for(process: Process, address: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        process.check()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("the engine is not ready")


def ask(args: argparse.Namespace, address: str, prompt: list[int]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    body = {"model": args.model, "prompt": prompt, "max_tokens": args.answer}
    body |= {"temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        usage = json.load(response)["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return len(prompt), details.get("cached_tokens") or 0


def measure(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Run all conversations with one configuration."""
    folder = args.out / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    gpus = args.gpus.split(",")
    with ExitStack() as stack:
        pool = None
        if name == "pool":
            stack.callback(start_keeper(args, folder, len(gpus)).kill)
            pool = folder / "pool.sock"
        part, addresses = args.host_gib / len(gpus), []
        started = []
        for gpu in gpus:
            process, address = start_engine(args, folder, gpu, pool, part)
            stack.callback(process.kill)
            started.append((process, address))
        for process, address in started:
            wait_for(process, address)
            addresses.append(address)

        def converse(number: int) -> list[tuple[int, int]]:
            rng = random.Random(f"{seed} {number}")
            length = args.first + args.turns * args.turn
            tokens = [rng.randrange(3, 200) for _ in range(length)]
            ends = [args.first + i * args.turn for i in range(args.turns)]
            return [ask(args, rng.choice(addresses), tokens[:end]) for end in ends]

        begun = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as clients:
            told = list(clients.map(converse, range(args.conversations)))
        seconds = time.perf_counter() - begun
    turns = [turn for each in told for turn in each]
    return {
        "config": name,
        "requests_per_s": round(len(turns) / seconds, 3),
        "cached": round(sum(c for _, c in turns) / sum(n for n, _ in turns), 4),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    args = arguments()
    results = []
    for seed in range(args.repeats):
        for name in args.configs.split(","):
            results.append(measure(args, name, seed))
            print(json.dumps(results[-1]), flush=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
