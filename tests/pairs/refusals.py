# SPDX-License-Identifier: Apache-2.0
"""Which features are refused together, found by asking for both.

    python -m tests.pairs.refusals RESULT.json

Each pair goes through the checks of an engine's start, those of upstream and those of
the tier. What they say is in the result, by `"A B"`.
"""

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_V1", "1")

from tests.e2e.model import LLAMA
from tests.e2e.release import known
from tests.sim.layouts import Layout, chunked, full, shards, window
from tests.sim.scheduler import Setup, make_scheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_tier.config import KVTierConfig

from ..settings import options
from .features import BY_CODE, FEATURES, PAIRS, Feature, Pair

VALUES: dict[Pair, dict[str, Any]] = {
    ("WB", "WT"): {"store_policy": ["write_back", "write_through"]},
    ("NG", "EA"): {"speculative_config": {"method": ["ngram", "eagle"]}},
}
"""What asks for two values of one setting."""

LAYOUTS = {
    ("SW", "DC"): Layout("", (shards(full(2), 2), window(6)), 4, num_shards=2),
    ("CL", "DC"): Layout("", (shards(full(2), 2), chunked(8)), 4, num_shards=2),
}
"""What only the scheduler refuses."""

_LONG = 160
"""Characters of a message that are enough to know it."""
_HAS = {"num_speculative_tokens": 2}
_DRAFT = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}


def messages() -> dict[str, str]:
    """What is said of each pair that is refused."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder, "model"), Path(folder, "draft")
        for path, config in {model: LLAMA, draft: LLAMA | _DRAFT}.items():
            path.mkdir()
            # One head, which ranks can share.
            config = config | {"num_key_value_heads": 1}
            (path / "config.json").write_text(json.dumps(config))
        for pair in PAIRS:
            if message := _said(lambda p=pair: _ask(p, model, draft)):  # type: ignore[misc]
                found[" ".join(pair)] = message
    return found


def _said(ask: Callable[[], object]) -> str:
    try:
        ask()
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        text = str(error)
        # Pydantic names the class, the check, and what it was given.
        pattern = r"(?:Value error|Assertion failed), (.*?) \[type="
        if inner := re.search(pattern, text, re.DOTALL):
            text = inner[1]
        words = " ".join(text.split())
        return words if len(words) < _LONG else f"{words[:_LONG]} …"
    return ""


def _ask(pair: Pair, model: Path, draft: Path) -> None:
    a, b = (BY_CODE[code] for code in pair)
    _ask_request(a, b)
    llm, tier = _llm(a, draft) | _llm(b, draft), {**a.tier, **b.tier}
    if "secondary_tiers" in a.tier and "secondary_tiers" in b.tier:
        both = [*a.tier["secondary_tiers"], *b.tier["secondary_tiers"]]
        tier["secondary_tiers"] = both
    values = VALUES.get(pair, {})
    (tier if "store_policy" in values else llm).update(values)
    settings = known(llm | {"kv_cache_memory_bytes": 1 << 20})
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        kv_offloading_backend="core",
        kv_offloading_size=None if "pool" in tier else 0.125,
        kv_offloading_config=options(**tier),
        **settings,
    ).create_engine_config()
    for feature in (a, b):
        if feature.path:
            # Upstream has it on GPUs only. The tier is asked all the same.
            section, name, value = feature.path
            object.__setattr__(getattr(config, section), name, value)
            KVTierConfig.from_vllm_config(config)
    if pair in LAYOUTS:
        make_scheduler(Setup(LAYOUTS[pair], spare_blocks=8, num_slots=8))


def _llm(feature: Feature, draft: Path) -> dict[str, Any]:
    if feature.code != "EA":
        return dict(feature.llm)
    return {"speculative_config": {"method": "eagle", "model": str(draft)} | _HAS}


def _ask_request(*features: Feature) -> None:
    """Whether a request can have what it is to have of both."""
    pools = any(feature.code == "PO" for feature in features)
    fields: dict[str, Any] = {}
    for feature in features:
        fields |= feature.sampling
    (PoolingParams if pools else SamplingParams)(**fields)


def main() -> None:
    logging.disable(logging.CRITICAL)
    names = {feature.code: feature.name for feature in FEATURES}
    result = {"names": names, "messages": messages()}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
