# SPDX-License-Identifier: Apache-2.0
"""Two engines on one GPU that are busy in turns: what each has of its memory.

    PYTHONPATH=scripts:scripts/bench python scripts/bench/elastic.py --out build/elastic

Each configuration is a pair of engines with random weights. Both are there all the
time; their bursts come in turns. An engine has two sets of prefixes, one a burst.

core       the tier, with device memory from kvcached (`shrink_after_s`)
kvcached   kvcached's own integration, without a tier
offload    upstream's OffloadingConnector; each engine has half of the memory
plain      neither, one engine, with room for all: the answers to compare with

`--memory-gib` is what all KV caches have together; whatever else is free on the GPU is
taken away before. Memory in use is what `nvidia-smi` says. The exit status is 1 if a
bar is missed. Answers are judged with `--batch-invariant` only, which is slower:
without, rounding differs from batch to batch. `--cpu` tries all of it but kvcached with
a tiny model on this machine.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from elastic_processes import Engine, Job, taken_away, used_bytes
from suite.equality import Comparison, compare
from suite.model import SHAPES
from suite.records import Output

GIB = 1 << 30
START_S = 240.0
SHRINK_S = 2.0
WITHIN_S = 8.0
BACK_BAR, FOUND_BAR = 0.95, 0.9


@dataclass(frozen=True)
class Scale:
    """What is asked of each engine."""

    shape: str
    dtype: str
    requests: int
    prefix: int
    tail: int
    output: int
    block: int
    batch: int
    sets: int = 2

    @property
    def burst_bytes(self) -> int:
        """KV of a burst."""
        tokens = self.requests * (self.prefix + self.tail + self.output + self.block)
        itemsize = 2 if self.dtype == "bfloat16" else 4
        return tokens * SHAPES[self.shape].kv_bytes_per_token(itemsize)


GPU = Scale("8b", "bfloat16", 12, 6144, 128, 32, 16, 8192)
CPU = Scale("tiny", "float32", 4, 384, 32, 8, 32, 512)


class Bench:
    """All configurations.

    Args:
        options: Of the command line.

    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.scale = CPU if options.cpu else GPU
        self.kv_bytes = int(options.memory_gib * GIB)
        if options.cpu:
            self.kv_bytes = int(1.5 * self.scale.burst_bytes)

    # --------------------------------------------------------------------- engines

    def start(
        self, name: str, letter: str, kv_bytes: int, more: dict[str, Any], **env: str
    ) -> Engine:
        scale = self.scale
        llm: dict[str, Any] = {
            "dtype": scale.dtype,
            "max_model_len": scale.prefix + scale.tail + scale.output + 64,
            "max_num_batched_tokens": scale.batch,
            "max_num_seqs": scale.requests,
            "block_size": scale.block,
            "enforce_eager": True,
            "kv_cache_memory_bytes": kv_bytes,
            # Engines that start see what the others have left.
            "gpu_memory_utilization": 0.1,
        }
        job = Job(
            scale.shape,
            scale.dtype,
            llm | more,
            letter,
            scale.requests,
            scale.sets,
            scale.prefix,
            scale.tail,
            scale.output,
            str(self.out / f"{name}-{letter}.jsonl"),
        )
        path = self.options.plain if name == "kvcached" else self.options.patched
        env = {"VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0"} | env
        if self.options.batch_invariant:
            env["VLLM_BATCH_INVARIANT"] = "1"
        return Engine(job, path, env)

    def pair(self, name: str) -> list[Engine]:
        """The engines of a configuration, idle."""
        host_gib = 1.15 * self.scale.sets * self.scale.burst_bytes / GIB
        env: dict[str, str] = {}
        kv_bytes, more = self.kv_bytes, dict[str, Any]()
        if name == "core":
            more = {
                "kv_offloading_backend": "core",
                "kv_offloading_size": host_gib,
                "kv_offloading_config": {
                    "shrink_after_s": SHRINK_S,
                    "debug": {"store_from_use": 1},
                },
            }
        elif name == "offload":
            kv_bytes //= 2
            more = {
                "kv_offloading_backend": "native",
                "kv_offloading_size": host_gib,
            }
        elif name == "kvcached":
            env = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
            env["PYTHONPATH"] = self._autopatched()
        letters = "a" if name == "plain" else "ab"
        engines: list[Engine] = []
        try:
            for letter in letters:
                engines.append(self.start(name, letter, kv_bytes, more, **env))
                if name == "core":
                    # The second one has what the first one gives back.
                    self._wait_until_ready(name, engines[-1])
                    time.sleep(SHRINK_S + 2)
            for engine in engines if name != "core" else []:
                self._wait_until_ready(name, engine)
        except BaseException:
            for engine in engines:
                engine.end()
            raise
        return engines

    def _wait_until_ready(self, name: str, engine: Engine) -> None:
        told = engine.told(START_S)
        letter = engine.job.name
        print(f"  {name} {letter}: ready in {told['start_s']} s", flush=True)

    def _autopatched(self) -> str:
        """A folder with which Python starts as it does where kvcached is installed in
        its own folder: with the file that patches vLLM."""
        folder = self.out / "autopatch"
        folder.mkdir(exist_ok=True)
        lines = "import os, site\nsite.addsitedir(os.environ['KVCACHED_SITE'])\n"
        (folder / "sitecustomize.py").write_text(lines)
        os.environ["KVCACHED_SITE"] = self.options.kvcached_site
        return str(folder)

    # ---------------------------------------------------------------------- bursts

    def run(self, name: str) -> list[dict[str, Any]]:
        """All bursts of a configuration."""
        found: list[dict[str, Any]] = []
        before = used_bytes()
        engines = self.pair(name)
        begun = used_bytes()
        try:
            for number in range(self.options.rounds):
                for engine in engines:
                    burst = engine.ask(burst=number)
                    burst |= {"config": name, "used": {"before": before}}
                    burst["used"] |= {"idle": begun, "end": used_bytes()}
                    time.sleep(WITHIN_S if name == "core" else 1.0)
                    burst["used"]["later"] = used_bytes()
                    burst["later"] = engine.ask(tell=True)["metrics"]
                    found.append(burst)
                    used = {k: round(v / GIB, 2) for k, v in burst["used"].items()}
                    mean = statistics.mean(burst["ttft_s"])
                    print(
                        f"  {name} {engine.job.name} burst {number}: TTFT mean "
                        f"{mean:.3f} s, median {statistics.median(burst['ttft_s']):.3f}"
                        f" s, cached {sum(burst['cached'])}, used GiB {used}",
                        flush=True,
                    )
        finally:
            for engine in engines:
                engine.end()
            lines = "".join(json.dumps(burst) + "\n" for burst in found)
            (self.out / f"{name}.jsonl").write_text(lines)
        return found

    # ------------------------------------------------------------------------ bars

    def judge(self, found: dict[str, list[dict[str, Any]]]) -> bool:
        """Print a table and the bars; whether all that were measured hold."""
        good = True
        ttft = {name: self._ttft(bursts) for name, bursts in found.items()}
        ttft = {name: times for name, times in ttft.items() if times}
        for name, times in ttft.items():
            again = [b for b in found[name] if self._is_known(b)]
            asked = len(again) * self.scale.requests * self.scale.prefix
            hits = sum(chain(*(b["cached"] for b in again))) / max(1, asked)
            last = [b["later"].get("vllm:num_preemptions", 0) for b in found[name]]
            print(
                f"{name:9} TTFT mean {statistics.mean(times):.3f} s, median "
                f"{statistics.median(times):.3f} s; prefixes found {hits:.3f}; "
                f"preemptions {max(last):.0f}"
            )

        def bar(what: str, value: float, least: float) -> None:
            nonlocal good
            good &= value >= least
            sign = "holds" if value >= least else "MISSED"
            print(f"bar {sign}: {what} {value:.3f}, at least {least:.3f}")

        if "core" not in ttft:
            return False
        core = found["core"]
        for burst in core:
            bar(f"given back by {burst['engine']}", self._given_back(burst), BACK_BAR)
        again = [b for b in core if self._is_known(b)]
        cached = sum(min(c, self.scale.prefix) for b in again for c in b["cached"])
        whole = self.scale.prefix // self.scale.block * self.scale.block
        asked = len(again) * self.scale.requests * whole
        bar("of evicted prefixes come back", cached / max(1, asked), FOUND_BAR)
        preempted = [float(b["later"].get("vllm:num_preemptions", 0)) for b in core]
        bar("preemptions, negative", -max(preempted), 0)
        mean, median = statistics.mean, statistics.median
        if "kvcached" in ttft:
            ratio = mean(ttft["kvcached"]) / mean(ttft["core"])
            bar("mean TTFT of kvcached alone, in ours", ratio, 1.0)
        if "offload" in ttft:
            ratio = median(ttft["offload"]) / median(ttft["core"])
            bar("median TTFT of OffloadingConnector, in ours", ratio, 1.0)
        if "plain" in found:
            same = self._same(found["plain"], core)
            print(
                f"answers: {same.requests} compared, {same.near_ties} differ at a near "
                f"tie, {same.wrong} elsewhere"
            )
            if self.options.batch_invariant or self.options.cpu:
                bar("wrong answers, negative", -same.wrong, 0)
        return good

    def _ttft(self, bursts: Sequence[dict[str, Any]]) -> list[float]:
        """Of all bursts with prefixes that were there before."""
        return [t for b in bursts if self._is_known(b) for t in b["ttft_s"]]

    def _is_known(self, burst: dict[str, Any]) -> bool:
        return burst["burst"] >= self.scale.sets

    def _given_back(self, burst: dict[str, Any]) -> float:
        """Part of the KV memory that a burst has taken which is free again, seen from
        outside; from inside where there is no GPU."""
        used, inside = burst["used"], burst["later"]
        if not used["end"]:
            mapped = inside["vllm:kv_tier_device_mapped_bytes"]
            return 1 - mapped / self.kv_bytes
        mapped = inside["vllm:kv_tier_device_mapped_bytes"]
        # What it still holds, it tells itself, but for the driver's page at the end of
        # each layer.
        gone = used["end"] - used["later"]
        return gone / (gone + mapped)

    def _same(
        self, plain: Sequence[dict[str, Any]], core: Sequence[dict[str, Any]]
    ) -> Comparison:
        result = Comparison()
        right = {b["burst"]: b for b in plain if b["engine"] == "a"}
        for burst in core:
            if burst["engine"] == "a":
                both = [_outputs(b) for b in (right[burst["burst"]], burst)]
                result.add(compare(*both))
        return result


def _outputs(burst: dict[str, Any]) -> list[Output]:
    pairs = zip(burst["tokens"], burst["gaps"], strict=True)
    return [Output(f"{i}", tokens, gaps) for i, (tokens, gaps) in enumerate(pairs)]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--configs", nargs="+", default=["core", "kvcached", "offload", "plain"]
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--memory-gib", type=float, default=16.0)
    parser.add_argument("--patched", default="", help="a PYTHONPATH for patched vLLM")
    parser.add_argument("--plain", default="", help="the same, not patched")
    parser.add_argument("--kvcached-site", default="", help="where kvcached lies")
    parser.add_argument(
        "--limit-s", type=float, default=1e9, help="start nothing later than this"
    )
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for. Returns the exit status."""
    options = options_of(arguments)
    bench = Bench(options)
    found: dict[str, list[dict[str, Any]]] = {}
    failed = False
    weights = 2 * SHAPES[bench.scale.shape].num_parameters
    # Weights, activations and contexts of both engines.
    keep = bench.kv_bytes + 2 * (weights + 4 * GIB)
    started = time.monotonic()
    for name in options.configs:
        begun = time.monotonic()
        if begun - started > options.limit_s:
            print(f"{name}: left out, there is no time", flush=True)
            failed = True
            continue
        try:
            with taken_away(None if options.cpu else keep):
                found[name] = bench.run(name)
        except (RuntimeError, KeyboardInterrupt) as e:
            failed = True
            print(f"{name}: {type(e).__name__}: {e}", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    for file in options.out.glob("*.jsonl"):
        # Of another call.
        if (name := file.stem) in ("core", "kvcached", "offload", "plain"):
            found.setdefault(name, list(map(json.loads, file.open())))
    return 0 if bench.judge(found) and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
