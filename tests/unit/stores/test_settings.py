# SPDX-License-Identifier: Apache-2.0
"""Settings of stores: a message for what is wrong, with the fix."""

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import fs
from vllm.v1.kv_tier.stores.fs import FsConfig, FsDebug, FsStore
from vllm.v1.kv_tier.stores.settings import parse_entry, parse_tiers

from ...settings import store_config, with_debug
from .objects import NAMESPACE, ROW_BYTES

KNOWN = "must be one of fs, redis, mooncake, or the import path of a StoreConfig"
GOOD: dict[str, Any] = {"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}
WRONG_NUMBERS: list[tuple[Any, str]] = [
    (0, "above 0"),
    (-1, "above 0"),
    (True, "a number"),
    ("200", "a number"),
    (None, "a number"),
    (float("inf"), "a finite number"),
    (float("nan"), "a finite number"),
]


def test_a_good_entry() -> None:
    assert store_config(GOOD) == FsConfig(root_dir="/mnt/kv", max_gib=200)
    more: dict[str, Any] = {
        "store_from_use": 1,
        "num_threads": 2,
        "deadline_ms": 5.5,
        "fetch": "always",
    }
    found = store_config(with_debug(GOOD, **more), 1)
    assert found == FsConfig(
        root_dir="/mnt/kv", max_gib=200, debug=FsDebug(**more), index=1
    )
    assert FsConfig(root_dir="/mnt/kv", max_gib=0.5).max_bytes == 1 << 29


def test_settings_reach_the_ranks_as_they_are() -> None:
    config = store_config(with_debug(GOOD, num_threads=2))
    assert pickle.loads(pickle.dumps(config)) == config


def test_keys_that_belong_into_debug_are_accepted_and_named() -> None:
    found, moved = parse_entry(GOOD | {"flush_s": 1, "num_threads": 2}, 3)
    assert found == FsConfig(
        root_dir="/mnt/kv",
        max_gib=200,
        debug=FsDebug(flush_s=1, num_threads=2),
        index=3,
    )
    place = "--kv-offloading-config: secondary_tiers[3].debug"
    assert moved == [f"{place}.flush_s", f"{place}.num_threads"]
    with pytest.raises(ValueError, match="flush_s is given in debug and outside of it"):
        parse_entry(with_debug(GOOD | {"flush_s": 1}, flush_s=2))


@dataclass(frozen=True)
class Unchecked(FsConfig):
    """A subclass whose fields pydantic does not see."""

    more: str = ""


@pytest.mark.parametrize(
    "entry, message",
    [
        ("fs", "[0] must be an object with a type (one of fs, redis, mooncake, or"),
        ({}, f"[0].type {KNOWN}, got None."),
        (GOOD | {"type": "s3"}, f"[0].type {KNOWN}, got 's3'."),
        (GOOD | {"type": ["fs"]}, f"[0].type {KNOWN}, got ['fs']."),
        (GOOD | {"type": f"{__name__}.Unchecked"}, "pydantic.dataclasses"),
        (GOOD | {"size": 1}, "[0]: unknown key 'size' (value 1). Known keys"),
        (GOOD | {"max_gb": 1}, "Did you mean max_gib? Known keys: type, debug, root_"),
        (GOOD | {"num_thread": 1}, "Did you mean debug.num_threads? Known keys"),
        (
            with_debug(GOOD, num_thread=1),
            "[0].debug: unknown key 'num_thread' (value 1). Did you mean "
            "debug.num_threads? Known keys: store_from_use, deadline_ms, fetch",
        ),
        (with_debug(GOOD, root_dir="/a"), "Did you mean root_dir? Known keys: store"),
        (GOOD | {"debug": [1]}, "[0].debug must be an object, got a list."),
        ({"type": "fs", "max_gib": 1}, "[0].root_dir is missing. Give it, as in {"),
        ({"type": "fs", "root_dir": "/a"}, "[0].max_gib is missing."),
        (GOOD | {"root_dir": "kv"}, "[0].root_dir must be the absolute path"),
        (GOOD | {"root_dir": 5}, "[0].root_dir must be a text, got 5."),
        *(
            (GOOD | {"max_gib": value}, f"[0].max_gib must be {word}, got {value!r}.")
            for value, word in WRONG_NUMBERS
        ),
        *(
            (
                with_debug(GOOD, deadline_ms=value),
                f"[0].debug.deadline_ms must be {word}, got {value!r}.",
            )
            for value, word in WRONG_NUMBERS
        ),
        (with_debug(GOOD, flush_s=-1), "debug.flush_s must be 0 or more, got -1."),
        *(
            (with_debug(GOOD, fetch=value), "must be 'if_faster' or 'always', got")
            for value in ("never", "", None, True)
        ),
        *(
            (
                with_debug(GOOD, num_threads=value),
                f"debug.num_threads must be {word}, got {value!r}.",
            )
            for value, word in (
                (0, "1 or more"),
                (65, "64 or less"),
                (1.5, "a whole number"),
                (True, "a whole number"),
                ("2", "a whole number"),
            )
        ),
        (with_debug(GOOD, num_processes=17), "must be 16 or less, got 17."),
    ],
)
def test_a_wrong_entry(entry: Any, message: str) -> None:
    whole = "--kv-offloading-config: secondary_tiers"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_entry(entry)
    assert str(error.value).startswith(whole)


def test_each_wrong_setting_has_a_line() -> None:
    wrong = {"type": "fs", "root_dir": "kv", "max_gib": 0, "size": 1}
    with pytest.raises(ValueError) as error:
        parse_tiers([with_debug(wrong, num_threads=0, fetc="always"), {"type": "s3"}])
    start = "--kv-offloading-config: secondary_tiers"
    lines = str(error.value).splitlines()
    assert [line.removeprefix(start).split(" ")[0] for line in lines] == [
        "[0]:",
        "[0].debug:",
        "[0].debug.num_threads",
        "[0].root_dir",
        "[0].max_gib",
        "[1].type",
    ]


def check(path: Path, max_gib: float = 0.001) -> None:
    FsConfig(root_dir=str(path), max_gib=max_gib).check()


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    check(tmp_path / "a" / "kv")
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700
    check(tmp_path / "a" / "kv")


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o777])
def test_a_directory_that_others_can_open(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=rf"\(mode {mode:o}\).*Set its mode to 700"):
        check(tmp_path)


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made.*or set another directory"):
        check(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be made.*or set another directory"):
        check(tmp_path / "file" / "kv")
    check(tmp_path / "kv")
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with pytest.raises(ValueError, match=f"Set its target.* {tmp_path}/kv"):
        check(tmp_path / "link")


def test_another_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(fs.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=f"belongs to user {os.getuid()}, but this"):
        check(tmp_path)


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:
        # Root may write everywhere but to file systems mounted for reading.
        monkeypatch.setattr(fs.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is not writable. Set its mode to 700"):
        check(tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    "mount, found",
    [
        ("rw,relatime shared:1 - nfs4 host:/kv rw,vers=4.2,local_lock=none", None),
        ("rw - nfs host:/kv rw,vers=3,nolock,local_lock=all", "nolock"),
        ("rw - nfs host:/kv rw,local_lock=flock", "local_lock=flock"),
        ("rw - lustre host:/kv rw,localflock", "localflock"),
        ("rw - cifs //host/kv rw,nobrl,soft", "nobrl"),
    ],
)
def test_locks_that_hold_on_one_machine_only(
    tmp_path: Path, mount: str, found: str | None
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    lines = [f"1 0 0:0 / / rw - ext4 a nolock\n36 35 {os.major(device)}:"]
    mounts.write_text(f"{lines[0]}{os.minor(device)} / /kv {mount}\n")
    assert fs.local_locks(tmp_path, mounts) == found
    assert fs.local_locks(tmp_path, tmp_path / "none") is None


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize / fs.GiB
    with pytest.raises(ValueError, match="does not fit.*Lower max_gib to [0-9.]+,"):
        check(tmp_path / "kv", max_gib=free + 1)
    check(tmp_path / "kv", max_gib=free / 2)
    # What it holds already needs no room.
    (tmp_path / "kv" / "held").touch()
    os.truncate(tmp_path / "kv" / "held", int(3 * fs.GiB))
    check(tmp_path / "kv", max_gib=free + 1)


def test_the_store_of_a_rank(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = store_config(GOOD | {"root_dir": str(tmp_path), "max_gib": 0.001})
    store = config.open(NAMESPACE, rank=3, slot_bytes=ROW_BYTES)
    assert isinstance(store, FsStore)
    assert (tmp_path / NAMESPACE / "r3").is_dir()
    store.close()
