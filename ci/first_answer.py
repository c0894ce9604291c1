# SPDX-License-Identifier: Apache-2.0
"""Serves a small model with the tier, as README.md says, and asks one question.

    PYTHONPATH=scripts PYTHON ci/first_answer.py FOLDER

PYTHON is that of an environment with the wheel and what it requires, nothing else; the
model, of random weights, is written to FOLDER.
"""

import json
import sys
import urllib.request
from functools import partial
from pathlib import Path

from bench.suite.model import QWEN3, Shape, write_model
from demo.serve import serving, vllm_serve
from demo.tokenizer import write_tokenizer

SHAPE = Shape(256, 512, 2, 4, 2, 64, vocab=32768, max_len=1024)
FLAGS = ("--kv-offloading-backend", "core", "--kv-offloading-size", "1")
ROOM = ("--gpu-memory-utilization", "0.2")
"""Upstream's engine for CPUs otherwise asks for 92% of the machine's memory."""


def ask(url: str, model: Path) -> str:
    """One completion."""
    body = {"model": str(model), "prompt": "Once upon a time", "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def main() -> int:
    """End with 1 and a reason where the tier is not on, or nothing is answered."""
    model = Path(sys.argv[1])
    write_tokenizer(model)
    write_model(model, SHAPE, "cpu", QWEN3)
    log = model / "server.log"
    say = partial(print, flush=True)
    with serving(vllm_serve(model, FLAGS + ROOM), log, say) as url:
        say(f"answer: {ask(url, model)!r}")
    on = [line for line in log.read_text().splitlines() if "host slots" in line]
    say(*on)
    return 0 if on else 1


if __name__ == "__main__":
    sys.exit(main())
