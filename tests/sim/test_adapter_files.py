# SPDX-License-Identifier: Apache-2.0
"""What others may find by its key is what was computed: files of a LoRA adapter may
change after keys were made and before ranks read them, and a KV connector may leave
blocks empty. Requests of such a step may have ended, or be aborted, in that step."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_tier.block_keys import AdapterLoads, set_adapter_loads
from vllm.v1.kv_tier.keeper.partition import Partition
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.outputs import KVConnectorOutput

from . import engine as sim
from .engine import Engine
from .layouts import LAYOUTS
from .scheduler import Setup
from .shared_pool import Machine

SETUP = Setup(LAYOUTS[0], 12, 20, "write_through", is_async=True)
PROMPT = list(range(1, 13))

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="has no secondary tiers and no pool"
)


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "adapter_model.safetensors").write_text("old")

    def named(name: str, number: int, path: str) -> LoRARequest:
        return LoRARequest(name, number, str(tmp_path))

    monkeypatch.setattr(sim, "LoRARequest", named)
    return tmp_path


def above_a_store(setup: Setup) -> Engine:
    return Engine(replace(setup, below=(1, 2)))


def in_a_pool(setup: Setup) -> Engine:
    return Machine(setup, 2, Partition, 0, Random(1)).engines[0]


class Loads(AdapterLoads):
    """Lets the simulator know keys that requests get while they are under way."""

    engine: Engine | None = None

    def check_files(self, numbers: Iterable[int]) -> bool:
        changed = super().check_files(numbers)
        assert self.engine is not None
        for conversation in self.engine._live.values():
            conversation.num_hashes = 0
            self.engine._learn_hashes(conversation)
        return changed


def make_engine(make: Callable[[Setup], Engine]) -> Engine:
    set_adapter_loads(loads := Loads(by_content=True))
    try:
        engine = make(replace(SETUP, adapter_files=loads))
    finally:
        set_adapter_loads(None)
    loads.engine = engine
    engine._scheduler.lora_config = SimpleNamespace(max_loras=4)  # type: ignore[assignment]
    return engine


def found(engine: Engine, hashes: list[BlockHash]) -> int:
    """How many of them are on some tier, counted once for each."""
    pool: Any = engine._pool
    on_device = [h for h in hashes if pool.get_cached_block(h, [0]) is not None]
    if pool.secondary is not None:
        tiers = [{bytes(key) for key in each._known} for each in pool.secondary.writers]
    else:
        own = pool.host._partition
        slots = own.published(0, own.num_slots)
        tiers = [{own.key_of(slot) for slot in slots}]
    below = set().union(*tiers)
    return len(on_device) + sum(any(h in key for key in below) for h in hashes)


def is_found(engine: Engine, hashes: list[BlockHash]) -> bool:
    """Whether any of them is on some tier when all has come to an end."""
    for _ in range(40):
        engine.step()
    return bool(found(engine, hashes))


MAKERS = pytest.mark.parametrize("make", [above_a_store, in_a_pool])


@MAKERS
@pytest.mark.parametrize("ends_at", [1, 2, 4])
@pytest.mark.parametrize("changes_at", [None, 0, 1])
def test_nothing_is_found_under_the_old_name(
    ends_at: int,
    changes_at: int | None,
    make: Callable[[Setup], Engine],
    adapter: Path,
) -> None:
    engine = make_engine(make)
    request = engine.add(PROMPT.copy(), ends_at, use_lora=True)
    old = list(request.block_hashes)
    assert old
    for step in range(40):
        if step == changes_at:
            (adapter / "adapter_model.safetensors").write_text("other weights")
        engine.step()
    assert bool(found(engine, old)) == (changes_at is None)


def change_and_abort(engine: Engine, request: Any, adapter: Path | None) -> None:
    """The request is in a step, files of the adapter change before ranks read them, and
    it is aborted before the output of that step comes."""
    engine._schedule(rush=False)
    while request.num_computed_tokens == 0:
        engine._process_oldest()
        engine._schedule(rush=False)
    if adapter is not None:
        (adapter / "adapter_model.safetensors").write_text("other weights")
    engine.abort(list(engine._live).index(request.request_id))
    engine._process_oldest()


@MAKERS
@pytest.mark.parametrize("is_recent", [True, False])
@pytest.mark.parametrize("changes", [False, True])
def test_nothing_of_an_aborted_request_is_found_under_the_old_name(
    changes: bool,
    is_recent: bool,
    make: Callable[[Setup], Engine],
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though no other request has the adapter, and its own came long before, and has
    waited for a KV connector since."""
    engine = make_engine(lambda setup: make(replace(setup, is_async=False)))
    request = engine.add(PROMPT.copy(), 4, use_lora=True)
    old = list(request.block_hashes)
    if not is_recent:
        loads: Any = engine.setup.adapter_files
        schedule = engine._scheduler.schedule

        def schedule_late() -> Any:
            output = schedule()
            loads._recent.clear()
            return output

        monkeypatch.setattr(engine._scheduler, "schedule", schedule_late)
    change_and_abort(engine, request, adapter if changes else None)
    assert is_found(engine, old) == (not changes)


@MAKERS
@pytest.mark.parametrize("changes", [False, True])
def test_nothing_of_an_aborted_request_that_was_preempted_is_found_under_the_old_name(
    changes: bool, make: Callable[[Setup], Engine], adapter: Path
) -> None:
    """When it runs again, it is not a new one, and has waited for long."""
    setup = {"by_priority": True, "is_async": False}
    engine = make_engine(lambda each: make(replace(each, **setup)))  # type: ignore[arg-type]
    request = engine.add(PROMPT.copy(), 4, use_lora=True, priority=1)
    while not request.num_output_tokens:
        engine.step()
    old = list(request.block_hashes)
    assert engine.reset(running=True)
    for i in range(24):
        engine.add([50 + i] * 12, 8)
    for _ in range(30):
        engine.step()
    assert request.num_computed_tokens == 0
    change_and_abort(engine, request, adapter if changes else None)
    assert is_found(engine, old) == (not changes)


@MAKERS
@pytest.mark.parametrize("fails", [False, True])
def test_blocks_that_a_connector_left_empty_are_not_found(
    fails: bool, make: Callable[[Setup], Engine]
) -> None:
    """The request was aborted, so that upstream finds no user of the blocks."""
    engine = make_engine(make)
    request = engine.add(PROMPT.copy(), 4)
    hashes = list(request.block_hashes)
    while request.num_computed_tokens == 0:
        engine.step()
    assert request.num_output_tokens == 0
    if fails:
        ids = engine._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        failed = KVConnectorOutput(invalid_block_ids={ids[0][0]})
        engine._in_flight[-1].result.kv_connector_output = failed
    engine.abort(0)
    assert is_found(engine, hashes) == (not fails)
