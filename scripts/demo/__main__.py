# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the same conversations with the host tier off and on.

    PYTHONPATH=scripts build/env/v0.32.0/bin/python -m demo --out build/demo

Makes a model, serves it twice with `vllm serve`, talks to it over HTTP, kills the
second server and starts it again, with what it had written to files. Writes to the
folder: `report.html`, `report.json`, `server-off.log`, `server-on.log`,
`server-again.log`, `spans.jsonl` (when copies ran), the files and the model. Ends with
0 if the tier did its work, else with 1 and the reasons.
"""

import argparse
import json
import platform
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAIError

from bench.suite.model import QWEN3, Shape, write_model
from page.demo import demo_page

from .client import ChatClient
from .prose import chapters, conversation
from .report import Comparison
from .restart import Restart, restarted, until_written
from .serve import ServerError, serving, vllm_serve
from .spans import SPANS
from .talk import Exchange, ask_with_hits, talk
from .tokenizer import write_tokenizer

SHAPE = Shape(768, 2048, 10, 12, 2, 64, vocab=32768, max_len=4096)
FLOAT32 = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Sizes:
    """How much is said, and how much room there is for its KV.

    All conversations together take about five times what the device has room for,
    and less than half of what the host has room for.
    """

    conversations: int = 6
    turns: int = 5
    first_chars: int = 2000
    later_chars: int = 1000
    answer_tokens: int = 24
    block_size: int = 32
    device_blocks: int = 72
    host_gib: float = 0.25
    files_gib: float = 0.5
    max_model_len: int = 2048

    def sayings(self) -> list[list[str]]:
        """What the users say: conversation by conversation, each of a chapter."""
        return [
            conversation(chapter, self.turns, self.first_chars, self.later_chars)
            for chapter in chapters()[: self.conversations]
        ]

    def warm_up(self) -> str:
        """What is said first, so that nobody measures a server's first request."""
        return conversation(chapters()[-1], 1, self.first_chars, 0)[0]

    def flags(self, shape: Shape, tier: bool, files: Path | None = None) -> list[str]:
        """The flags of `vllm serve`; `files`: where KV goes below the host."""
        from vllm.engine.arg_utils import EngineArgs

        block_bytes = self.block_size * shape.kv_bytes_per_token(FLOAT32)
        flags: dict[str, Any] = {
            "--served-model-name": "demo",
            # A prefix that is loaded changes the shapes of the sums after it, and so
            # their rounding: in bfloat16 enough to turn a close choice.
            "--dtype": "float32",
            "--max-model-len": self.max_model_len,
            "--max-num-batched-tokens": self.max_model_len,
            "--max-num-seqs": 8,
            "--block-size": self.block_size,
            # The CPU engines of some releases do not look at the bytes.
            "--num-gpu-blocks-override": self.device_blocks,
        }
        if hasattr(EngineArgs, "kv_cache_memory_bytes"):
            flags["--kv-cache-memory-bytes"] = self.device_blocks * block_bytes
        if tier:
            flags |= {
                "--kv-offloading-size": self.host_gib,
                "--kv-offloading-backend": "core",
                "--worker-extension-cls": "demo.recorder.Recorder",
            }
        if files is not None:
            below = {"type": "fs", "root_dir": str(files), "max_gib": self.files_gib}
            # All that the host has, however slow the machine is.
            below |= {"debug": {"store_from_use": 1, "deadline_ms": 10_000}}
            flags["--kv-offloading-config"] = json.dumps({"secondary_tiers": [below]})
        # No compilation: it would take longer than the conversations.
        switches = ["--enforce-eager", "--enable-prompt-tokens-details"]
        return [f"{flag}={value}" for flag, value in flags.items()] + switches


class Demo:
    """The steps of the demo, with a line of progress for each."""

    def __init__(self, out: Path) -> None:
        self.sizes = Sizes()
        self.shape = SHAPE
        self.out = out
        self.start = time.monotonic()

    def note(self, text: str) -> None:
        """Prints a line of progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def make_model(self) -> dict[str, Any]:
        """Writes the model folder; returns what the report says of it."""
        folder = self.out / "model"
        tokenizer = write_tokenizer(folder)
        said = set(tokenizer(" ".join(chapters())).input_ids)
        said -= set(tokenizer.all_special_ids)
        parameters = write_model(folder, self.shape, "cpu", QWEN3, said)
        kv_bytes = self.shape.kv_bytes_per_token(FLOAT32)
        self.note(
            f"made a Qwen3 of random weights: {parameters / 1e6:.0f} M parameters, "
            f"{kv_bytes} bytes of KV a token"
        )
        return {
            "architecture": "Qwen3ForCausalLM",
            "parameters": parameters,
            "layers": self.shape.layers,
            "hidden_size": self.shape.hidden,
            "dtype": "float32",
            "kv_bytes_per_token": kv_bytes,
        }

    @property
    def files(self) -> Path | None:
        """Where KV goes below the host; None: this release's blocks have no names."""
        # Not at the top: `--off-only` is for a vLLM that has no tier.
        from vllm.v1.kv_tier.releases import keys_are_bytes

        return (self.out / "kv").resolve() if keys_are_bytes() else None

    def serve(self, name: str, tier: bool, kill: bool = False) -> Any:
        """A server of the model, for a `with` statement, see `serving`."""
        files = self.files if tier else None
        flags = self.sizes.flags(self.shape, tier, files)
        log = self.out / f"server-{name}.log"
        self.note(f"tier {name}: vllm serve {' '.join(flags)}")
        command = vllm_serve(self.out / "model", flags)
        environment = {}
        if tier:
            # Else some releases draw a random number for the names of blocks.
            environment["PYTHONHASHSEED"] = "0"
        if name == "on":
            environment[SPANS] = str((self.out / "spans.jsonl").resolve())
        return serving(command, log, self.note, environment, kill)

    def run(self, tier: bool) -> tuple[list[Exchange], int, int]:
        """Serves the model and talks to it.

        Returns:
            The exchanges, and for how many tokens the device and the host have room.

        """
        answer_tokens = self.sizes.answer_tokens
        with self.serve("on" if tier else "off", tier, kill=tier) as url:
            self.note("ready; the first request takes longer and does not count")
            with ChatClient(url) as client:
                warm_up = [{"role": "user", "content": self.sizes.warm_up()}]
                ask_with_hits(client, warm_up, answer_tokens, tier)
                sayings = self.sizes.sayings()
                exchanges = talk(client, sayings, answer_tokens, tier, self.note)
                metrics = client.metrics()
                if tier and self.files:
                    blocks = until_written(client, answer_tokens)
                    self.note(f"{blocks} KV blocks are in files; SIGKILL")
        blocks = int(metrics.label("vllm:cache_config_info", "num_gpu_blocks"))
        slots = metrics.value("vllm:kv_tier_host_slots") if tier else 0
        return exchanges, blocks * self.sizes.block_size, slots * self.sizes.block_size

    def restart(self, exchanges: list[Exchange]) -> Restart:
        """Starts the server again after it was killed, and asks for a turn it knew."""
        with self.serve("again", tier=True) as url, ChatClient(url) as client:
            restart = restarted(
                client, self.sizes.warm_up(), self.sizes.sayings()[0], exchanges
            )
        self.note(restart.text())
        return restart

    def compare(self) -> list[str]:
        """Both runs and their report.

        Returns:
            What fell short; nothing if all is well.

        """
        # Not at the top: `--off-only` is for a vLLM that has no tier.
        from vllm.v1.kv_tier import about

        build = about()
        names = [patch["name"] for patch in build["patches"]]
        path = self.out / "report.json"
        page = path.with_suffix(".html")
        for stale in (path, page, self.out / "spans.jsonl"):
            stale.unlink(missing_ok=True)
        shutil.rmtree(self.out / "kv", ignore_errors=True)
        self.note(f"vLLM {build['version']}, {len(names)} patches on {build['tag']}")
        model = self.make_model()
        off, device_tokens, _ = self.run(tier=False)
        on, _, host_tokens = self.run(tier=True)
        comparison = Comparison(off, on, device_tokens, host_tokens)
        restart = self.restart(on) if self.files else None
        failures = comparison.failures() + (restart.failures() if restart else [])
        report = {
            "tag": build["tag"],
            "version": build["version"],
            "patches": names,
            "model": model,
            "machine": f"{platform.machine()}, {platform.platform()}",
            "seconds": round(time.monotonic() - self.start),
            **comparison.as_json(),
            "restart": restart and restart.as_json(),
            "failures": failures,
        }
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(f"\n{comparison.table()}\n")
        page.write_text(demo_page(self.out))
        self.note(f"wrote {page} and {path}")
        return failures

    def run_off_only(self) -> None:
        """The run without the tier, which an unpatched vLLM can do."""
        self.make_model()
        off, device_tokens, _ = self.run(tier=False)
        comparison = Comparison(off, off, device_tokens, 0)
        print(f"\n{comparison.table()}\n")
        said = [token for exchange in off for token in exchange.answer.token_ids]
        self.note(
            f"{comparison.kv_tokens / device_tokens:.1f} times the device cache, "
            f"{len(set(said))} different tokens of {len(said)}, smallest margin "
            f"{comparison.as_json()['smallest_margin']:.2g} nats; one answer: "
            f"{off[0].answer.text!r}"
        )


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--off-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Unwinds the `with` blocks, so that no server stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    demo = Demo(arguments.out)
    try:
        if arguments.off_only:
            demo.run_off_only()
            return 0
        failures = demo.compare()
    except ImportError as error:
        failures = [f"{error}: not the patched vLLM, run this with `make demo`"]
    except (ServerError, OpenAIError, LookupError, RuntimeError) as error:
        failures = [str(error)]
    for failure in failures:
        demo.note(f"FAILED: {failure}")
    if not failures:
        demo.note("SUCCESS: same answers, sooner")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
