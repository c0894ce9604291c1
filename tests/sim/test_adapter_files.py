# SPDX-License-Identifier: Apache-2.0
"""Files of a LoRA adapter that change after keys were made and before ranks read them:
what is computed with the new weights is found under no name of the old ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads
from vllm.v1.kv_tier.releases import keys_are_bytes

from . import engine as sim
from .engine import Engine
from .layouts import LAYOUTS
from .scheduler import Setup

SETUP = Setup(LAYOUTS[0], 12, 20, "write_through", below=(1, 2), is_async=True)
PROMPT = list(range(1, 13))


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "adapter_model.safetensors").write_text("old")

    def named(name: str, number: int, path: str) -> LoRARequest:
        return LoRARequest(name, number, str(tmp_path))

    monkeypatch.setattr(sim, "LoRARequest", named)
    return tmp_path


def engine_with_files() -> Engine:
    set_adapter_loads(AdapterLoads(by_content=True))
    try:
        engine = Engine(SETUP)
    finally:
        set_adapter_loads(None)
    engine._scheduler.lora_config = SimpleNamespace(max_loras=4)  # type: ignore[assignment]
    return engine


def found(engine: Engine, hashes: list[BlockHash]) -> int:
    """How many of them are on some tier."""
    pool: Any = engine._pool
    writers = pool.secondary.writers
    on_device = [h for h in hashes if pool.get_cached_block(h, [0]) is not None]
    below = {bytes(key) for each in writers for key in each._known}
    return len(on_device) + sum(any(h in key for key in below) for h in hashes)


@pytest.mark.skipif(not keys_are_bytes(), reason="has no secondary tiers")
@pytest.mark.parametrize("ends_at", [1, 2, 4])
@pytest.mark.parametrize("changes_at", [None, 0, 1])
def test_nothing_is_found_under_the_old_name(
    ends_at: int, changes_at: int | None, adapter: Path
) -> None:
    """Also of requests that have ended in the step that read the files."""
    engine = engine_with_files()
    request = engine.add(PROMPT.copy(), ends_at, use_lora=True)
    old = list(request.block_hashes)
    assert old
    for step in range(40):
        if step == changes_at:
            (adapter / "adapter_model.safetensors").write_text("other weights")
        engine.step()
    assert bool(found(engine, old)) == (changes_at is None)
