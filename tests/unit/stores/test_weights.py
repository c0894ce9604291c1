# SPDX-License-Identifier: Apache-2.0
"""Weights are known by all of their bytes, and read once."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import identity as module
from vllm.v1.kv_tier.stores.identity import FileStates, model_files

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kv_tier" / "weights.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(SIZE))
    (folder / "b.safetensors").write_bytes(b"some weights")
    return folder


def names(folder: Path) -> list[Any]:
    _, paths = model_files(*model_at(str(folder)))
    digests = FileStates([folder]).digests(paths)
    return [
        [path.name, path.stat().st_size, digest] for path, digest in zip(paths, digests)
    ]


def settles(patch: pytest.MonkeyPatch) -> None:
    """As if files had been written long ago."""
    patch.setattr(module, "SETTLED_NS", -(10**15))


def reads_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_read", lambda path: pytest.fail(f"{path} was read"))


def flip(path: Path, place: int) -> None:
    """A bit, and the time is put back: a copy that keeps times looks like this."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# Samples were at sixteenths.
@pytest.mark.parametrize("place", [0, 70_000, SIZE // 2 + 9000, SIZE - 1])
def test_each_bit_counts(
    model: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settles(monkeypatch)
    before = names(model)
    assert names(model) == before
    flip(model / "a.safetensors", place)
    after = names(model)
    assert after[0] != before[0] and after[1] == before[1]
    flip(model / "a.safetensors", place)
    assert names(model) == before


def test_a_copy_has_the_same_name(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert names(other) == names(model)


def test_a_file_is_read_once(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settles(monkeypatch)
    before = names(model)
    assert cache.stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patch:
        reads_nothing(patch)
        assert names(model) == before
    # One more file, and the others stay remembered.
    (model / "c.safetensors").write_bytes(b"more")
    assert names(model)[:2] == before
    reads_nothing(monkeypatch)
    assert names(model)[:2] == before


def test_what_was_written_just_now_is_read_again(model: Path, cache: Path) -> None:
    """It could be written to once more within the same tick of a clock."""
    names(model)
    assert not cache.exists()


@pytest.mark.parametrize("fault", ["not JSON", "open to others", "a link", "a folder"])
def test_a_memory_that_cannot_be_trusted_is_none(
    model: Path, cache: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settles(monkeypatch)
    right = names(model)
    forged = {state: "0" * 32 for state in json.loads(cache.read_text())}
    assert len(forged) == 2
    cache.write_text(json.dumps(forged))
    assert names(model) != right, "the control: what is remembered is used"
    if fault == "not JSON":
        cache.write_text("[1, 2")
    elif fault == "open to others":
        cache.chmod(0o666)
    elif fault == "a link":
        cache.rename(cache.with_name("elsewhere"))
        cache.symlink_to(cache.with_name("elsewhere"))
    else:
        cache.unlink()
        cache.mkdir()
    assert names(model) == right


def test_a_file_that_changes_meanwhile_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = module.blake3

    def written_to(**options: Any) -> Any:
        with (model / "b.safetensors").open("ab") as file:
            file.write(b"more")
        return digest(**options)

    written_to.AUTO = digest.AUTO  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "blake3", written_to)
    with pytest.raises(ValueError, match="is being written to.* Start the engine when"):
        names(model)


def test_what_a_hub_named_by_its_bytes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for digit in "ab":
        (blobs / (digit * 64)).write_bytes(bytes(SIZE))
    link = snapshot / "a.safetensors"
    link.symlink_to(blobs / ("a" * 64))
    reads_nothing(monkeypatch)
    before = names(snapshot)
    link.unlink()
    link.symlink_to(blobs / ("b" * 64))
    assert names(snapshot) != before


# --------------------------------------------- what changes while the ranks load it


def model_at(place: str, **load: Any) -> tuple[Any, Any]:
    model = SimpleNamespace(model=place, revision=None, multimodal_config=None)
    usual = {"load_format": "auto", "download_dir": None}
    usual["model_loader_extra_config"] = None
    return model, SimpleNamespace(**usual | load)


def digests(states: FileStates, folder: Path) -> list[str]:
    _, paths = model_files(*model_at(str(folder)))
    return states.digests(paths)


def replace(model: Path) -> None:
    other = model / "a.tmp"
    other.write_bytes(bytes(SIZE))
    other.replace(model / "a.safetensors")


def swap(model: Path) -> None:
    """A deploy by renaming directories, whose files are old."""
    (model.parent / "next").rename(model.parent / "now")
    model.rename(model.parent / "last")
    (model.parent / "now").rename(model)


CHANGES = {
    "written in place": lambda model: flip(model / "a.safetensors", 7),
    "replaced by the same bytes": replace,
    "one more": lambda model: (model / "c.safetensors").write_bytes(b"more"),
    "a configuration": lambda model: (model / "quantize_config.json").write_text("{}"),
    "another directory": swap,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_it_is_loaded_is_refused(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settles(monkeypatch)
    shutil.copytree(model, tmp_path / "next")
    # All are remembered, and the right bytes are known.
    names(model)
    names(tmp_path / "next")
    states = FileStates([model])
    assert len(digests(states, model)) == 2
    CHANGES[change](model)
    with pytest.raises(
        ValueError, match="while the engine loaded it.*Start the engine"
    ):
        digests(states, model)


def a_snapshot(hub: Path, digit: str) -> Path:
    (hub / "blobs").mkdir(parents=True, exist_ok=True)
    blob = hub / "blobs" / (digit * 64)
    blob.write_bytes(digit.encode() * 100)
    folder = hub / "snapshots" / digit
    folder.mkdir(parents=True)
    (folder / "a.safetensors").symlink_to(blob)
    return folder


def test_what_the_ranks_download_is_known_if_nothing_else_came(tmp_path: Path) -> None:
    hub = tmp_path / "models--a--b"
    # There was nothing.
    states = FileStates([])
    first = a_snapshot(hub, "a")
    assert digests(states, first)
    # Which of the two did they load?
    second = a_snapshot(hub, "b")
    for folder in (first, second):
        with pytest.raises(ValueError, match="while the engine loaded it"):
            digests(states, folder)
    assert digests(FileStates([first]), first)


def test_a_file_that_is_gone_is_refused(model: Path) -> None:
    states = FileStates([model])
    _, paths = model_files(*model_at(str(model)))
    paths[0].unlink()
    with pytest.raises(ValueError, match="while the engine loaded it"):
        states.digests(paths)


def test_a_directory_of_downloads_is_the_one_that_the_engine_has(
    tmp_path: Path,
) -> None:
    folder = a_snapshot(tmp_path / "models--a--b", "a")
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a")
    found, paths = model_files(*model_at("a/b", download_dir=str(tmp_path)))
    assert found == folder and [path.name for path in paths] == ["a.safetensors"]
    with pytest.raises(ValueError, match="are not on this machine"):
        model_files(*model_at("a/b", download_dir=str(tmp_path / "other")))


@pytest.mark.parametrize("load_format", ["modelexpress", "ipc_cache", "my_own"])
def test_weights_from_elsewhere_are_refused(model: Path, load_format: str) -> None:
    with pytest.raises(ValueError, match=f"--load-format {load_format} loads weights"):
        model_files(*model_at(str(model), load_format=load_format))


def test_a_loader_that_its_plugin_accepts_has_secondary_tiers(model: Path) -> None:
    """That of the benchmarks, whose engines have files and servers."""
    from bench.suite.loader import LOAD_FORMAT

    assert model_files(*model_at(str(model), load_format=LOAD_FORMAT))[1]


def test_a_tensorizer_file_must_be_here(model: Path) -> None:
    def files(uri: str) -> list[Path]:
        load = {"load_format": "tensorizer"}
        options = {"model_loader_extra_config": {"tensorizer_uri": uri}}
        return model_files(*model_at(str(model), **load, **options))[1]

    assert files("/mnt/a.tensors")
    for uri in ("s3://bucket/a.tensors", "/mnt/a-%03d.tensors"):
        with pytest.raises(ValueError, match="--load-format tensorizer loads weights"):
            files(uri)


def test_folders_count_where_weights_came_from_them(model: Path) -> None:
    (model / "audio").mkdir()
    (model / "audio" / "c.safetensors").write_bytes(b"more")
    both = [model_files(*model_at(str(model)), inner)[1] for inner in ([], ["audio"])]
    assert len(both[0]) == 2 and len(both[1]) == 3
    assert len(FileStates([model]).digests(both[1])) == 3
