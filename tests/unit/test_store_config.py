# SPDX-License-Identifier: Apache-2.0
"""Settings of stores: what is wrong says so, with the mend."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import fs
from vllm.v1.kv_tier.stores.by_name import check_entry
from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore

from .stores import NAMESPACE, ROW_BYTES

KNOWN = "must be one of fs, redis, mooncake, or the import path of a StoreConfig"
GOOD: dict[str, Any] = {"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}


def test_a_good_entry() -> None:
    assert check_entry(GOOD) == FsConfig("/mnt/kv", 200)
    more = {
        "store_from_use": 1,
        "num_threads": 2,
        "deadline_ms": 5.5,
        "fetch": "always",
    }
    assert check_entry(GOOD | more, 1) == FsConfig("/mnt/kv", 200, **more, index=1)
    assert FsConfig("/mnt/kv", 0.5).max_bytes == 1 << 29


@pytest.mark.parametrize(
    "entry, message",
    [
        ("fs", "[0] must be an object with a type (one of fs, redis, mooncake, or"),
        ({}, f"[0].type {KNOWN}, got None."),
        (GOOD | {"type": "s3"}, f"[0].type {KNOWN}, got 's3'."),
        (GOOD | {"type": ["fs"]}, f"[0].type {KNOWN}, got ['fs']."),
        (GOOD | {"size": 1}, "[0]: unknown key 'size' (value 1). Known keys"),
        ({"type": "fs", "max_gib": 1}, "[0].root_dir is missing. An entry of type"),
        ({"type": "fs", "root_dir": "/a"}, "[0].max_gib is missing."),
        (GOOD | {"root_dir": "kv"}, "[0].root_dir must be the absolute path"),
        (GOOD | {"root_dir": 5}, "got 5. Give one like /mnt/kv."),
        *(
            (GOOD | {name: value}, f"[0].{name} must be above 0, got {value!r}.")
            for name in ("max_gib", "deadline_ms")
            for value in (0, -1, True, "200", None, float("inf"), float("nan"))
        ),
        *(
            (GOOD | {"store_from_use": value}, "must be a whole number from 1 on")
            for value in (0, 1.5, True, "2")
        ),
        *(
            (GOOD | {"fetch": value}, "[0].fetch must be one of if_faster, always, got")
            for value in ("never", "", None, True)
        ),
        *(
            (GOOD | {"num_threads": value}, "must be a whole number from 1 to 64")
            for value in (0, 65, 1.5, True, "2")
        ),
    ],
)
def test_what_is_wrong_says_so(entry: Any, message: str) -> None:
    whole = "--kv-offloading-config: secondary_tiers"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_entry(entry)
    assert str(error.value).startswith(whole)


def check(path: Path, max_gib: float = 0.001) -> None:
    FsConfig(str(path), max_gib).check()


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
    config = check_entry(GOOD | {"root_dir": str(tmp_path), "max_gib": 0.001})
    store = config.open(NAMESPACE, rank=3, slot_bytes=ROW_BYTES)
    assert isinstance(store, FsStore)
    assert (tmp_path / NAMESPACE / "r3").is_dir()
    store.close()
