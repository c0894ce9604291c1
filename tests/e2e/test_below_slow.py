# SPDX-License-Identifier: Apache-2.0
"""Files below the host that take longer than computing. How much is lost to them is
measured by scripts/bench/below_ttft.py."""

import time
from pathlib import Path

from .below import HIT, NEEDS_KEYS, ask, counted, directory, prompts, serving, writes
from .model import make_llama, make_tokenizer
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(1100, 6)
DELAY_S = 1.0
"""Of each object: a prompt of this model is computed in far less."""


def test_what_is_slower_than_computing_is_computed(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model")
    make_tokenizer(model)
    delay = tmp_path / "delay"
    delay.write_text("0")
    entry = directory(tmp_path / "kv") | {
        "type": "tests.e2e.slow_store.SlowConfig",
        "delay_file": str(delay),
    }
    with serving(model, [entry], tmp_path / "log1") as server:
        texts = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
    assert len(set(texts)) == len(PROMPTS)
    with serving(model, [entry], tmp_path / "log2") as server:
        ask(server, text(1200, HIT))
        # The control: at its own speed it serves.
        assert ask(server, PROMPTS[0]) == (texts[0], HIT)
        delay.write_text(str(1e3 * DELAY_S))
        # Who meets it first waits for what has begun.
        assert ask(server, PROMPTS[1])[0] == texts[1]
        loaded = counted(server, "secondary_loaded_blocks")
        begun = time.monotonic()
        for prompt, right in zip(PROMPTS[2:], texts[2:]):
            assert ask(server, prompt) == (right, 0)
        assert time.monotonic() < begun + 4 * 5 * DELAY_S
        assert counted(server, "secondary_loaded_blocks") == loaded
