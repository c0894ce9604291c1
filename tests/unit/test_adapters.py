# SPDX-License-Identifier: Apache-2.0
"""Which load of an adapter the keys of a request's blocks name."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sim import upstream
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_tier import block_keys
from vllm.v1.kv_tier.block_keys import (
    AdapterLoads,
    note_adapter_load,
    note_adapter_unload,
    set_adapter_loads,
)
from vllm.v1.kv_tier.bounded import size_of
from vllm.v1.request import Request

from ..names import init_none_hash, sha256

BLOCK = 4
PROMPT = list(range(2 * BLOCK))


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    init_none_hash(sha256)
    set_adapter_loads(AdapterLoads())
    yield
    set_adapter_loads(None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    write(folder, "1")
    return folder


def write(folder: Path, weights: str) -> None:
    (folder / "adapter_model.safetensors").write_text(weights)


def lora(
    path: Path | str, number: int = 1, name: str = "a", **more: bool
) -> LoRARequest:
    if more.keys() - set(LoRARequest.__struct_fields__):
        pytest.skip("this release cannot reload an adapter in place")
    return LoRARequest(name, number, str(path), **more)


def request(
    adapter: LoRARequest | None, salt: str | None = None, hasher: Any = None
) -> Request:
    return upstream.make_request(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=20),
        pooling_params=None,
        lora_request=adapter,
        cache_salt=salt,
        block_hasher=hasher or get_request_block_hasher(BLOCK, sha256),
    )


def keys(adapter: LoRARequest | None, hasher: Any = None) -> list[BlockHash]:
    """Of the blocks of a prompt, each with content of its own."""
    found = list(request(adapter, hasher=hasher).block_hashes)
    assert len(set(found)) == 2
    return found


def test_a_salt_is_not_taken_for_an_adapter(path: Path) -> None:
    """Upstream's keys of older releases do so (upstream issue 44701)."""
    salted = request(None, salt="a").block_hashes
    assert set(salted).isdisjoint(request(lora(path)).block_hashes)
    set_adapter_loads(None)
    if hasattr(kv_cache_utils, "salt_key"):
        # The control: keys as upstream's.
        salted, named = (
            request(*args).block_hashes for args in [(None, "a"), (lora(path),)]
        )
        assert salted[0] == named[0]


def test_first_load_has_the_keys_of_upstream(path: Path) -> None:
    note_adapter_load(lora(path))
    first = keys(lora(path))
    set_adapter_loads(None)
    assert keys(lora(path)) == first
    assert keys(None) not in (first, [])


def test_a_reload_in_place_begins_anew(path: Path) -> None:
    old = keys(lora(path))
    note_adapter_load(lora(path, load_inplace=True))
    new = keys(lora(path))
    assert not set(new) & set(old)
    assert keys(lora(path, load_inplace=True)) == new
    assert keys(lora(path, load_inplace=True)) == new


def test_other_adapters_keep_theirs(path: Path, tmp_path: Path) -> None:
    old = keys(lora(tmp_path, 2, "b")), keys(None)
    note_adapter_load(lora(path, load_inplace=True))
    assert (keys(lora(tmp_path, 2, "b")), keys(None)) == old


def test_a_request_that_reloads_begins_anew_when_files_changed(path: Path) -> None:
    old = keys(lora(path))
    assert keys(lora(path, load_inplace=True)) == old
    write(path, "other")
    new = keys(lora(path, load_inplace=True))
    assert not set(new) & set(old)
    # Those that follow run with the same weights, whatever they say.
    assert keys(lora(path)) == new
    assert keys(lora(path, load_inplace=True)) == new


def test_same_size_is_another_file(path: Path) -> None:
    new = [keys(lora(path, load_inplace=True))]
    stat = (path / "adapter_model.safetensors").stat()
    write(path, "2")
    os.utime(path / "adapter_model.safetensors", ns=(0, stat.st_mtime_ns + 1))
    new.append(keys(lora(path, load_inplace=True)))
    assert new[0] != new[1]


def test_files_out_of_sight_may_always_have_changed() -> None:
    there = lora("hub/adapter", load_inplace=True)
    assert keys(there) != keys(there)
    now = keys(lora("hub/adapter"))
    assert keys(lora("hub/adapter")) == now


def test_a_new_id_is_a_new_load(path: Path) -> None:
    first = keys(lora(path, 1))
    note_adapter_load(lora(path, 2))
    second = keys(lora(path, 2))
    assert not set(first) & set(second)
    assert keys(lora(path, 1)) == first
    assert keys(lora(path, 2)) == second


def test_an_adapter_that_was_dropped_is_loaded_anew(path: Path) -> None:
    first = keys(lora(path))
    other = keys(lora(path, 2, "b"))
    note_adapter_unload(1)
    second = keys(lora(path))
    assert not set(first) & set(second)
    assert keys(lora(path)) == second
    assert keys(lora(path, 2, "b")) == other


def test_the_engine_notes_what_it_loads_and_drops(path: Path) -> None:
    done = SimpleNamespace(
        add_lora=lambda adapter: True, remove_lora=lambda number: True
    )
    engine: Any = SimpleNamespace(
        model_executor=done,
        request_block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    for number in (1, 2):
        EngineCore.add_lora(engine, lora(path, number))
    # Whose request comes first does not matter.
    second, first = keys(lora(path, 2)), keys(lora(path, 1))
    assert not set(first) & set(second)
    EngineCore.remove_lora(engine, 1)
    assert not set(first) & set(keys(lora(path, 1)))
    set_adapter_loads(None)
    assert keys(lora(path, 1)) == first


def test_a_running_request_keeps_its_load(path: Path) -> None:
    running = request(lora(path))
    running.append_output_token_ids([1] * BLOCK)
    set_adapter_loads(None)
    same = request(lora(path))
    same.append_output_token_ids([1] * BLOCK)
    assert len(running.block_hashes) == 3
    assert running.block_hashes == same.block_hashes


CHANGES: dict[str, Callable[[Path], object]] = {
    "a reload in place": lambda path: note_adapter_load(lora(path, load_inplace=True)),
    "a reload by a request": lambda path: [
        write(path, "other"),  # type: ignore[func-returns-value]
        keys(lora(path, load_inplace=True)),
    ],
    "dropped": lambda path: note_adapter_unload(1),
    # Its id must be its own, but nothing checks that.
    "another one in its place": lambda path: note_adapter_load(
        lora(path, 1, "b", load_inplace=True)
    ),
}


@pytest.mark.parametrize("by_content", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_lives_through_a_change_has_keys_of_its_own(
    change: str, by_content: bool, path: Path
) -> None:
    """Those that were hashed before, too: a preemption computes their blocks again."""
    set_adapter_loads(AdapterLoads(by_content))
    under_way = [request(lora(path)), request(lora(path)), request(lora(path, 2, "c"))]
    old = [list(each.block_hashes) for each in under_way]
    CHANGES[change](path)
    for each in under_way:
        each.append_output_token_ids([1] * BLOCK)
    first, second, other = (each.block_hashes for each in under_way)
    now = lora(path, 1, "b" if change.startswith("another") else "a")
    new = keys(now)
    assert len(set(first)) == len(set(second)) == 3
    assert set(first).isdisjoint([*second, *old[0], *new])
    assert list(other[:2]) == old[2], "another adapter keeps its load"
    assert keys(now) == new


class Fails(RuntimeError):
    pass


CALLS: dict[str, Callable[[EngineCore, Path], object]] = {
    "a reload in place": lambda engine, path: EngineCore.add_lora(
        engine, lora(path, load_inplace=True)
    ),
    "a load": lambda engine, path: EngineCore.add_lora(engine, lora(path)),
    "a drop": lambda engine, path: EngineCore.remove_lora(engine, 1),
}


def engine_with(of_ranks: Callable[[], bool]) -> Any:
    executor = SimpleNamespace(
        add_lora=lambda adapter: of_ranks(), remove_lora=lambda number: of_ranks()
    )
    hasher = get_request_block_hasher(BLOCK, sha256)
    return SimpleNamespace(model_executor=executor, request_block_hasher=hasher)


@pytest.mark.parametrize("by_content", [False, True])
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_after_a_call_that_failed_in_a_rank_no_load_is_known(
    call: str, is_there: bool, by_content: bool, path: Path
) -> None:
    """Some ranks may have the old weights still, and others the new ones."""
    set_adapter_loads(AdapterLoads(by_content))
    where = path if is_there else Path("hub/adapter")
    came: list[Request] = []

    def fails() -> bool:
        came.append(request(lora(where), hasher=engine.request_block_hasher))
        raise Fails

    engine = engine_with(fails)
    hasher = engine.request_block_hasher
    old = keys(lora(where), hasher)
    if is_there and call != "a drop":
        write(path, "other")
    with pytest.raises(Fails):
        CALLS[call](engine, where)
    (meanwhile,) = came
    unknown = [keys(lora(where), hasher), keys(lora(where), hasher), old]
    unknown.append(list(meanwhile.block_hashes))
    assert len({key for each in unknown for key in each}) == 8
    # Once more, and it works.
    again = engine_with(lambda: True)
    again.request_block_hasher = hasher
    EngineCore.add_lora(again, lora(where, load_inplace=True))
    new = keys(lora(where), hasher)
    assert new == keys(lora(where), hasher)
    known = {key for each in unknown for key in each}
    if call != "a drop" or not by_content or not is_there:
        assert known.isdisjoint(new)


@pytest.mark.parametrize("by_content", [False, True])
def test_files_that_change_while_ranks_read_them_are_of_no_known_load(
    by_content: bool, path: Path
) -> None:
    set_adapter_loads(AdapterLoads(by_content))

    def reads() -> bool:
        write(path, "other")
        return True

    engine = engine_with(reads)
    EngineCore.add_lora(engine, lora(path))
    hasher = engine.request_block_hasher
    unknown = [keys(lora(path), hasher), keys(lora(path), hasher)]
    assert len({key for each in unknown for key in each}) == 4


def test_without_a_tier_a_call_that_fails_changes_no_keys(path: Path) -> None:
    set_adapter_loads(None)
    old = keys(lora(path))

    def fails() -> bool:
        raise Fails

    with pytest.raises(Fails):
        EngineCore.add_lora(engine_with(fails), lora(path))
    assert keys(lora(path)) == old


@pytest.mark.parametrize("by_content", [False, True])
def test_files_that_change_without_a_reload_are_of_no_known_load(
    by_content: bool, path: Path
) -> None:
    """Workers have the old weights until they drop them, and read the new ones then."""
    set_adapter_loads(AdapterLoads(by_content))
    old = keys(lora(path))
    write(path, "other")
    unknown = [keys(lora(path)), keys(lora(path)), old]
    assert len({key for each in unknown for key in each}) == 6
    note_adapter_unload(1)
    new = keys(lora(path))
    assert new == keys(lora(path)) and not set(new) & set(old)


def test_an_id_with_another_adapter_is_of_no_known_load(path: Path) -> None:
    keys(lora(path, 1))
    note_adapter_load(lora(path, 1, "b"))
    assert not set(keys(lora(path, 1, "b"))) & set(keys(lora(path, 1, "b")))


def test_adapters_take_a_bounded_memory(path: Path) -> None:
    loads = AdapterLoads()
    old = loads.of(request(lora(path, 1, "a")))
    for number in range(2, 20_000):
        loads.load(lora(path, number, f"{number}" * 1000))
    sizes = [size_of(list(each.items())) for each in (loads._loaded, loads._names)]
    assert sum(sizes) < 20 << 20
    # It was forgotten, so what comes now may be another one.
    assert loads.of(request(lora(path, 1, "a"))) != old


def test_engines_of_a_process_count_their_own_loads(path: Path) -> None:
    """An engine that starts later, with or without a tier, changes no other keys."""
    first = get_request_block_hasher(BLOCK, sha256)
    before = keys(lora(path), first)
    set_adapter_loads(AdapterLoads())
    second = get_request_block_hasher(BLOCK, sha256)
    set_adapter_loads(None)
    third = get_request_block_hasher(BLOCK, sha256)
    note_adapter_load(lora(path, load_inplace=True), second)
    note_adapter_load(lora(path, load_inplace=True), third)
    assert keys(lora(path), first) == before == keys(lora(path), third)
    assert not set(keys(lora(path), second)) & set(before)
    note_adapter_load(lora(path, load_inplace=True), first)
    assert not set(keys(lora(path), first)) & set(before)


# ----------------------------------------------------- with a tier below the host


@pytest.fixture
def by_content() -> None:
    set_adapter_loads(AdapterLoads(by_content=True))


def elsewhere(adapter: LoRARequest) -> list[BlockHash]:
    """The keys of another process."""
    set_adapter_loads(AdapterLoads(by_content=True))
    return keys(adapter)


@pytest.mark.usefixtures("by_content")
def test_another_process_knows_an_adapter_by_its_bytes(path: Path) -> None:
    first = keys(lora(path))
    assert elsewhere(lora(path)) == first
    write(path, "2")
    assert not set(elsewhere(lora(path))) & set(first)
    write(path, "1")
    assert elsewhere(lora(path)) == first


def test_each_field_of_a_request_for_an_adapter_counts_but_those_that_are_listed(
    path: Path,
) -> None:
    others = set(LoRARequest.__struct_fields__) - block_keys._NO_WEIGHTS
    known = {"is_3d_lora_weight", "tensorizer_config_dict", "long_lora_max_len"}
    for field in others & (known | {"lora_local_path"}):
        changed = lora(path)
        setattr(changed, field, {"a": 1} if field.endswith("dict") else 1)
        for by_content in (False, True):
            set_adapter_loads(AdapterLoads(by_content))
            hasher = get_request_block_hasher(BLOCK, sha256)
            old = keys(lora(path), hasher)
            # Under the same id, which another adapter must not have.
            assert not set(keys(changed, hasher)) & set(old)
        assert not set(elsewhere(changed)) & set(old)
        if field == "tensorizer_config_dict":
            # Its bytes lie where nobody looks.
            assert not set(elsewhere(changed)) & set(elsewhere(changed))
        else:
            assert elsewhere(changed) == elsewhere(changed)
    shown = lora(path)
    shown.base_model_name = "a model"
    assert elsewhere(shown) == elsewhere(lora(path))


@pytest.mark.usefixtures("by_content")
def test_one_that_came_back_is_the_one_that_it_was(path: Path) -> None:
    first = keys(lora(path))
    note_adapter_unload(1)
    assert keys(lora(path)) == first
    write(path, "2")
    note_adapter_load(lora(path, load_inplace=True))
    assert not set(keys(lora(path))) & set(first)


@pytest.mark.usefixtures("by_content")
def test_what_cannot_be_read_is_nobody_elses() -> None:
    first = keys(lora("hub/adapter"))
    assert keys(lora("hub/adapter")) == first
    assert not set(elsewhere(lora("hub/adapter"))) & set(first)


@pytest.mark.usefixtures("by_content")
def test_a_request_under_way_is_never_taken_for_one_of_the_new_weights(
    path: Path,
) -> None:
    waiting = request(lora(path))
    write(path, "2")
    note_adapter_load(lora(path, load_inplace=True))
    waiting.append_output_token_ids([1] * BLOCK)
    for weights in ("1", "2"):
        write(path, weights)
        assert not set(elsewhere(lora(path))) & set(waiting.block_hashes)


def test_a_file_that_becomes_shorter_ends_no_process(tmp_path: Path) -> None:
    """Which a mapped file does, by SIGBUS."""
    script = (
        "import builtins, os, sys; from vllm.v1.kv_tier import block_keys as a\n"
        "real = builtins.open\n"
        "def shorter(path, *args, **more):\n"
        "    file = real(path, *args, **more); os.truncate(path, 10); return file\n"
        "a.open = shorter\n"
        "print(a._content(sys.argv[1]))"
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8 << 20))
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert (tmp_path / "adapter_model.safetensors").stat().st_size == 10


@pytest.mark.usefixtures("by_content")
def test_files_that_change_while_they_are_read_are_nobody_elses(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = block_keys._content

    def written_to(place: str) -> str | None:
        found = read(place)
        write(path, "other")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(block_keys, "_content", written_to)
        first = keys(lora(path))
    for weights in ("1", "other"):
        write(path, weights)
        assert not set(elsewhere(lora(path))) & set(first)
