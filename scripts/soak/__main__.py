# SPDX-License-Identifier: Apache-2.0
"""Serve a small model with the host tier under mixed HTTP load for some minutes.

    PYTHONPATH=scripts build/env/v0.32.0/bin/python -m soak --out build/soak

A reference server, without a tier and with room for everything, answers all questions
first. Then clients ask a server with the tier, whose device cache has room for a
twentieth of them: chats and completions, whole and as streams, with three models
(adapters) and three salts; some hang up, and the prefix cache is reset now and then.
At the end every host slot is spoilt, which the clients must notice.

With `--below`, a directory and a Valkey server lie below the host, and are harmed all
the time: files are damaged, swapped and deleted, the server forgets, stands still and
dies. Nothing is reset then, since a reset ends the use of both.

With `--hostile`, clients send what nobody should instead, see `hostile`; a server
without a tier says what upstream itself makes of it.

Writes `report.json` and the servers' logs. Ends with 0 if no answer was wrong, no
request failed, and memory at the end is what it was after a fifth of the time, which
begins after some minutes of the same load (`--warm-up`).
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.model import make_llama, make_lora, make_tokenizer
from tests.e2e.release import cache_bytes
from tests.e2e.server import Server

from .clients import Load
from .faults import Faults
from .hostile import Hostile, Look, what_failed, worse
from .questions import CHAT_TEMPLATE, Conversation, learn_answers, make_conversations
from .watch import Watch, growth

ROOT = Path(__file__).parents[2]
MiB, GiB = 1 << 20, 1 << 30

BLOCK_TOKENS, BLOCK_BYTES = 32, 64 << 10
MODEL, ADAPTERS = "llama", ("lora-a", "lora-b", "lora-c")

METRICS = (
    "num_preemptions_total",
    "kv_tier_stored_blocks_total",
    "kv_tier_loaded_blocks_total",
    "kv_tier_loaded_ahead_blocks_total",
    "kv_tier_deferred_requests_total",
    "kv_tier_evicted_slots_total",
    "kv_tier_host_hit_tokens_total",
    "kv_tier_device_hit_tokens_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
"""Of the report, without `vllm:`."""

PROCESSES = {
    "API server": "APIServer",
    "engine core": "EngineCore",
    "worker": "VLLM::Worker",
}
"""Whose memory a hostile run looks at: names, and titles that upstream gives them."""

GROWTH = 0.02
"""How much more memory may be in use at the end."""


@dataclass(frozen=True)
class Sizes:
    """How much is said, and how much room there is for its KV."""

    minutes: float = 10.0
    warm_up_minutes: float = 5.0
    """Before these. The workers' memory grows meanwhile, with the tier off too."""
    clients: int = 16
    conversations: int = 64
    turns: int = 5
    device_blocks: int = 24
    host_slots: int = 1000

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    def make_conversations(self) -> list[Conversation]:
        # Not the model itself: on CPUs, upstream's LoRA kernels give a request without
        # an adapter that of the last slot.
        return make_conversations(ADAPTERS, self.conversations, self.turns, 200, 40)


def make_model(folder: Path) -> Path:
    """Write the model, its tokenizer and its adapters."""
    model = make_llama(folder / MODEL)
    make_tokenizer(model)
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    for seed, name in enumerate(ADAPTERS):
        make_lora(folder / name, seed)
    return model


def flags(
    folder: Path,
    num_blocks: int,
    num_slots: int,
    below: list[dict[str, Any]],
    meets: bool = False,
) -> list[str]:
    """Of `vllm serve`; without a tier if `num_slots` is 0."""
    adapters = [f"{name}={folder / name}" for name in ADAPTERS]
    found = [
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--block-size", str(BLOCK_TOKENS)),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
        *cache_bytes(num_blocks * BLOCK_BYTES),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--chat-template", str(folder / "chat.jinja")),
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
        *("--max-cpu-loras", "3", "--lora-modules", *adapters),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
        *("--middleware", "soak.loop_lag.LoopLag"),
    ]
    if num_slots:
        size = num_slots * BLOCK_BYTES / GiB
        found += ["--kv-offloading-backend", "core"]
        found += ["--kv-offloading-size", repr(size)]
        found += ["--worker-extension-cls", "tests.e2e.spoil_extension.SpoilSlots"]
    if below:
        config = {"secondary_tiers": below, "debug": {"meet": meets}}
        found += ["--kv-offloading-config", json.dumps(config)]
    return found


def environment(logs: bool = True) -> dict[str, str]:
    """Of a server. Upstream logs bodies that it refuses: hostile ones make 8 GB in a
    quarter of an hour."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        **({} if logs else {"VLLM_LOGGING_LEVEL": "CRITICAL"}),
    }


class Soak:
    """The steps of a run, with a line of progress for each.

    Args:
        out: Folder of the model, the logs and the report.
        sizes: See there.
        tier: Whether the server has one; without, the run says what memory does then.
        below: Whether it has stores below it, which are harmed.
        meets: Whether requests compute while these are read.

    """

    def __init__(
        self,
        out: Path,
        sizes: Sizes,
        tier: bool = True,
        below: bool = False,
        meets: bool = False,
    ) -> None:
        self.out = out
        self.sizes = sizes
        self.tier = tier
        self.faults = Faults(out) if below else None
        self._meets = meets
        self.wrong: list[str] = []
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def run(self) -> dict[str, Any]:
        """All of it. The report's `failures` is empty if all is well."""
        self.out.mkdir(parents=True, exist_ok=True)
        model = make_model(self.out)
        conversations = self.sizes.make_conversations()
        reference = self._serve(model, "reference", 4000, 0)
        try:
            asyncio.run(learn_answers(reference.url, conversations))
        finally:
            reference.kill()
        questions = [q for c in conversations for q in c.questions]
        num_blocks = sum(c.num_tokens // BLOCK_TOKENS for c in conversations)
        overcommit = num_blocks / (self.sizes.device_blocks - 1)
        self.note(
            f"the reference answered {len(questions)} questions, "
            f"{sum(q.is_clear for q in questions)} of them clearly; their KV is "
            f"{overcommit:.1f} times the device cache, for each of 3 salts"
        )
        num_slots = self.sizes.host_slots if self.tier else 0
        if self.faults is not None:
            # So much comes back from below.
            num_slots //= 10
        server = self._serve(model, "server", self.sizes.device_blocks, num_slots)
        try:
            report = asyncio.run(self._load(server, conversations))
            report["overcommit"] = round(overcommit, 1)
            failures = report["failures"]
            # Upstream may call its engine dead when it ends.
            log = server.log()
            code = server.terminate()
            left = [*server.leftover_processes(), *server.stranded_shared_memory()]
            if code or left:
                failures.append(f"exit code {code}, left behind: {left}")
            # What is too slow says so.
            log = re.sub(r".*KV tier: secondary tier .* is too slow.*", "", log)
            if bad := re.findall(r".*(?:ERROR|Traceback).*", log):
                failures.append(f"{len(bad)} errors in the log, first: {bad[0]}")
        finally:
            server.kill()
            if self.faults is not None:
                self.faults.end()
        (self.out / "wrong.txt").write_text("\n".join(self.wrong))
        path = self.out / "report.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        self.note(f"wrote {path}")
        return report

    def _serve(
        self, model: Path, name: str, num_blocks: int, slots: int, logs: bool = True
    ) -> Server:
        log = self.out / f"{name}.log"
        below = self.faults.entries if self.faults is not None and slots else []
        found = flags(self.out, num_blocks, slots, below, self._meets)
        self.note(f"starting the {name}")
        return Server(model, found, environment(logs), log)

    async def _load(
        self, server: Server, conversations: list[Conversation]
    ) -> dict[str, Any]:
        seconds = self.sizes.seconds
        warm_up = 60 * self.sizes.warm_up_minutes
        resets = self.faults is None
        if self.faults:
            self.faults.begin()
        async with Load(server.url, conversations, resets=resets) as load:
            self.note(f"{self.sizes.clients} clients for {warm_up:.0f} s, to warm up")
            await load.run(self.sizes.clients, time.monotonic() + warm_up)
            self.note(f"{self.sizes.clients} clients for {seconds:.0f} s")
            watch = Watch(server)
            ends = time.monotonic() + seconds
            await asyncio.gather(
                load.run(self.sizes.clients, ends),
                watch.run(ends),
                self._tell(load, ends),
            )
            failures = watch.at_rest()
            watch.look()
            await load.ask_all()
        tally = load.tally
        self.wrong = [*tally.wrong, *tally.errors]
        early = watch.mean(0.18 * seconds, 0.22 * seconds)
        late = watch.mean(0.96 * seconds, seconds)
        growth = {
            "rss": late.rss / early.rss - 1,
            "pss": late.pss / early.pss - 1,
        }
        # What leaks is in both. RSS grows too when processes come to share pages, PSS
        # with the end of others that have the same files mapped.
        if (least := min(growth.values())) > GROWTH and seconds >= 300:
            failures.append(f"memory (RSS and PSS) grew by {100 * least:.2f}%")
        failures += watch.faults[:3]
        for kind, texts in (("wrong answers", tally.wrong), ("errors", tally.errors)):
            if texts:
                failures.append(f"{len(texts)} {kind}, first: {texts[0]}")
        report: dict[str, Any] = {
            "seconds": seconds,
            "counts": dict(tally.counts),
            "wrong": len(tally.wrong),
            "errors": len(tally.errors),
            "growth": {name: round(grown, 5) for name, grown in growth.items()},
            "mib_at_a_fifth": _mib(early),
            "mib_at_the_end": _mib(late),
            "pss_mib_by_tenth": [
                round(watch.mean(t * seconds / 10, (t + 1) * seconds / 10).pss / MiB, 1)
                for t in range(10)
            ],
            "metrics": {name: watch.value(f"vllm:{name}") for name in METRICS},
            "failures": failures,
        }
        if self.faults is not None:
            report["faults"] = dict(self.faults.counts)
            failures += self._look_below(watch, report["metrics"])
        if self.tier:
            if not watch.value("vllm:kv_tier_host_hit_tokens_total"):
                failures.append("nothing came from the host")
            report["wrong_when_spoilt"] = await self._spoil(server, conversations)
            if not report["wrong_when_spoilt"]:
                failures.append("nobody noticed spoilt host slots")
        return report

    def _look_below(self, watch: Watch, metrics: dict[str, float]) -> list[str]:
        """Complete the metrics. Returns what did not happen below the host."""
        names = [
            f"kv_tier_secondary_{name}_blocks_total"
            for name in ("loaded", "missed", "stored")
        ]
        if self._meets:
            names.append("kv_tier_jumped_tokens_total")
        metrics |= {name: watch.value(f"vllm:{name}") for name in names}
        return [f"{name} is 0" for name in names if not metrics[name]]

    def run_hostile(self) -> dict[str, Any]:
        """Instead of `run`: clients who send what nobody should."""
        self.out.mkdir(parents=True, exist_ok=True)
        model = make_model(self.out)
        report: dict[str, Any] = {}
        looks: list[dict[str, Look]] = []
        for name, num_slots in (("reference", 0), ("server", self.sizes.host_slots)):
            num_blocks = self.sizes.device_blocks
            server = self._serve(model, name, num_blocks, num_slots, logs=False)
            try:
                looks.append(asyncio.run(self._press(server, name, report)))
                server.get("/health")
            except OSError as error:
                report[name]["faults"].append(f"/health of the {name}: {error!r}")
            finally:
                server.kill()
        report["failures"] = worse(*reversed(looks)) + what_failed(
            report["server"], report["reference"], self.sizes.seconds >= 300
        )
        (self.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        return report

    async def _press(
        self, server: Server, name: str, report: dict[str, Any]
    ) -> dict[str, Look]:
        """Look and load, for the report of the server with this name."""
        hostile = Hostile(server.url, MODEL)
        looks = await hostile.look()
        self.note(f"{len(looks)} odd requests in a quiet moment")
        seconds, warm_up = self.sizes.seconds, 60 * self.sizes.warm_up_minutes
        await hostile.press(time.monotonic() + warm_up, looks)
        self.note(f"{hostile.served} requests served, to warm up")
        loaded = Hostile(server.url, MODEL)
        watch, ends = Watch(server), time.monotonic() + seconds
        await asyncio.gather(loaded.press(ends, looks), watch.run(ends))
        self.note(f"{loaded.served} requests served")
        memory = {
            process: watch.sizes(server.pid_of(title))
            for process, title in PROCESSES.items()
        }
        report[name] = {
            "counts": loaded.counts,
            "served": loaded.served,
            "broken": loaded.broken,
            "growth": {who: round(growth(sizes), 5) for who, sizes in memory.items()},
            "mib_by_tenth": {who: _tenths(sizes) for who, sizes in memory.items()},
            "blocked_ms": {
                request: [round(look.median_ms, 1), round(look.worst_ms, 1)]
                for request, look in looks.items()
                if request.startswith("1 MB")
            },
            "faults": watch.faults,
        }
        return looks

    async def _spoil(self, server: Server, conversations: list[Conversation]) -> int:
        """Spoil all host slots. Returns how many answers were wrong then."""
        server.post("/collective_rpc", {"method": "spoil_all_slots", "args": [0]})
        async with Load(server.url, conversations) as load:
            await load.ask_all(last_first=self.faults is not None)
        self.note(f"{len(load.tally.wrong)} wrong answers from spoilt slots")
        return len(load.tally.wrong)

    async def _tell(self, load: Load, ends: float) -> None:
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 60))
            tally = load.tally
            self.note(
                f"{tally.counts['compared']} answers compared, {len(tally.wrong)} "
                f"wrong, {len(tally.errors)} errors"
            )


def _mib(memory: Any) -> dict[str, float]:
    all_bytes = {"rss": memory.rss, "pss": memory.pss, **memory.by_process}
    return {name: round(size / MiB, 1) for name, size in all_bytes.items()}


def _tenths(sizes: list[int]) -> list[float]:
    """The median of each tenth, in MiB."""
    parts = [
        sizes[len(sizes) * i // 10 : len(sizes) * (i + 1) // 10] for i in range(10)
    ]
    return [round(median(part) / MiB, 1) for part in parts if part]


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    parser.add_argument("--minutes", type=float, default=Sizes.minutes)
    parser.add_argument("--warm-up", type=float, default=Sizes.warm_up_minutes)
    parser.add_argument("--off", action="store_true", help="without a tier")
    parser.add_argument(
        "--below", action="store_true", help="with stores below it, which are harmed"
    )
    parser.add_argument(
        "--meet",
        action="store_true",
        help="with --below: requests compute while the stores are read",
    )
    parser.add_argument(
        "--hostile",
        action="store_true",
        help="with clients who send what nobody should",
    )
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    sizes = Sizes(arguments.minutes, arguments.warm_up)
    if arguments.off and arguments.below:
        parser.error("--off and --below exclude each other: stores lie below a tier")
    if arguments.meet and not arguments.below:
        parser.error("--meet needs --below: without stores nothing is met")
    soak = Soak(out, sizes, not arguments.off, arguments.below, arguments.meet)
    report = soak.run_hostile() if arguments.hostile else soak.run()
    print(json.dumps(report, indent=2))
    for failure in report["failures"]:
        soak.note(f"FAILED: {failure}")
    if not report["failures"]:
        soak.note("SUCCESS: every answer right, and memory as it was")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
