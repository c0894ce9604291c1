# SPDX-License-Identifier: Apache-2.0
"""Workloads that ask an engine for all that its requests can have, one after the other.

What is computed first is found on the host later, and is compared with that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm.lora.request import LoRARequest

from .engine import Answer, Engine
from .harm import checks_slots, spoil_first_load, spoil_slots, stop_spoiling
from .model import LLAMA, VOCAB_SIZE, make_lora
from .workloads import BLOCK, fill_device, scratch_folder, text, workload

ADAPTER = 70


def _hints(**hints: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_tier": hints}}}


class _Requests:
    """By name what is asked, as far as the engine can be asked for it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._adapter = folder / "adapter"
        config = engine.core.vllm_config
        much = 10**6
        self.asked: dict[str, dict[str, Any]] = {
            "plain": {},
            "RL": _hints(conversation="a", release=True),
            "RT": _hints(retain=[{"priority": 90, "ttl": 600, "answer": True}]),
            "PW": {},
            "TN": _hints(tenant="a"),
            "CA": _hints(max_load_tokens=much, max_offload_tokens=much),
            "NN": {"n": 2, "temperature": 1.0, "seed": 5},
            "PL": {"prompt_logprobs": 3},
        }
        if config.model_config.enable_prompt_embeds:
            g = torch.Generator().manual_seed(3)
            table = torch.randn(VOCAB_SIZE, LLAMA["hidden_size"], generator=g)
            self.asked["PE"] = {"embeddings": table}
        if config.lora_config is not None:
            self._load(1)
            self.asked["LO"] = {"lora": LoRARequest("a", ADAPTER, str(self._adapter))}
            self.asked["LR"] = self.asked["LO"]

    def _load(self, seed: int) -> None:
        make_lora(self._adapter, seed)
        name, path = "a", str(self._adapter)
        self._engine.core.add_lora(LoRARequest(name, ADAPTER, path, load_inplace=True))

    def ask(self, name: str) -> Answer:
        number = list(self.asked).index(name)
        prompt = text(1900 + number, 5 * BLOCK + 1)
        (answer,) = self._engine.generate(
            [prompt], **{"max_tokens": 8, **self.asked[name]}
        )
        return answer

    def ask_all(self) -> dict[str, Answer]:
        """Each, and an adapter again after it was loaded with other weights."""
        found = {}
        for name in self.asked:
            if name == "LR":
                self._load(2)
            found[name] = self.ask(name)
        return found

    def prewarm(self) -> None:
        number = list(self.asked).index("PW")
        hints = _hints(prewarm=True)
        prompt = text(1900 + number, 5 * BLOCK + 1)
        self._engine.generate([prompt], max_tokens=1, **hints)


@contextmanager
def _requests(engine: Engine) -> Iterator[_Requests]:
    with scratch_folder() as folder:
        yield _Requests(engine, folder)


@workload
def meet(engine: Engine) -> dict[str, Any]:
    """Everything twice, and before the second time nothing is on the device."""
    with _requests(engine) as requests:
        computed = requests.ask_all()
        found = {}
        for i, name in enumerate(requests.asked):
            if name == "LO":
                # Its weights are gone.
                continue
            fill_device(engine, seed=900 + 10 * i)
            if name == "PW":
                requests.prewarm()
            found[name] = requests.ask(name)
        # One is spoilt, and must be noticed.
        fill_device(engine, seed=990)
        if all(engine.on_ranks(checks_slots)):
            # What is spoilt behind the check is not what it is for.
            filled = sorted(slot.index for slot in engine.pool.host.filled_slots())
            num_spoilt = engine.on_ranks(spoil_slots, filled)
            spoilt = requests.ask("plain")
        else:
            engine.on_ranks(spoil_first_load, range(engine.pool.host.num_slots))
            spoilt = requests.ask("plain")
            num_spoilt = engine.on_ranks(stop_spoiling)
    return {
        "computed": computed,
        "found": found,
        "spoilt": spoilt,
        "num_spoilt": num_spoilt,
    }
