# SPDX-License-Identifier: Apache-2.0
"""The format of an object: no byte of it may change unnoticed."""

import os
from pathlib import Path

import pytest

from vllm.v1.kv_tier.stores import format as form
from vllm.v1.kv_tier.stores.format import CHECKSUMS, ObjectFormat

from .objects import KEYS, NAMESPACE, ROW_BYTES, empty, row


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "object"
    write(path)
    return path


FORMAT = ObjectFormat(NAMESPACE, 0)


def write(path: Path, key: bytes = KEYS[0]) -> None:
    with path.open("wb", buffering=0) as file:
        FORMAT.write(file.fileno(), key, row(0))


def read(path: Path, format_: ObjectFormat = FORMAT, key: bytes = KEYS[0]) -> bool:
    place = empty()
    with path.open("rb") as file:
        is_right = format_.read(file.fileno(), key, place)
    assert place == row(0) or not is_right
    return is_right is True


def test_what_is_written_is_read(written: Path) -> None:
    assert read(written)
    assert written.stat().st_size == FORMAT.size(KEYS[0], ROW_BYTES) == 128 + ROW_BYTES


@pytest.mark.parametrize("length", [1, 32, 64, 65, 120])
def test_keys_of_any_length(tmp_path: Path, length: int) -> None:
    key = os.urandom(length)
    write(tmp_path / "object", key)
    assert read(tmp_path / "object", key=key)
    assert FORMAT.size(key, ROW_BYTES) % 64 == ROW_BYTES % 64


def test_every_flipped_bit_is_noticed(written: Path) -> None:
    content = bytearray(written.read_bytes())
    for i in range(len(content)):
        content[i] ^= 1 << i % 8
        written.write_bytes(content)
        assert not read(written), i
        content[i] ^= 1 << i % 8
    written.write_bytes(content)
    assert read(written)


def test_every_length_but_the_right_one_is_noticed(written: Path) -> None:
    content = written.read_bytes()
    for length in (0, 1, 63, 64, 127, 128, len(content) - 1):
        written.write_bytes(content[:length])
        assert not read(written), length


def test_another_object_is_noticed(written: Path) -> None:
    assert not read(written, ObjectFormat("f" * 32, 0))
    assert not read(written, ObjectFormat(NAMESPACE, 1))
    assert not read(written, key=KEYS[1])
    assert not read(written, key=KEYS[0] + b"\0")


def test_blake3_is_always_known_and_an_unknown_checksum_is_a_miss(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blake3 = {b"blake3": CHECKSUMS[b"blake3"]}
    monkeypatch.setattr(form, "CHECKSUMS", blake3)
    write(written)
    assert read(written)
    newer = blake3 | {b"newer": lambda row: bytes(16)}
    monkeypatch.setattr(form, "CHECKSUMS", newer)
    # What an engine without it has written is read on.
    assert read(written)
    write(written)
    assert read(written)
    monkeypatch.setattr(form, "CHECKSUMS", blake3)
    assert not read(written)


def test_a_slow_checksum_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert form.advice() is None
    monkeypatch.setattr(form, "CHECKSUMS", {b"blake3": CHECKSUMS[b"blake3"]})
    assert "pip install xxhash" in str(form.advice())


def test_a_write_that_is_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, parts = os.writev, []

    def write_little(fd: int, buffers: list) -> int:
        parts.append(writev(fd, [b"".join(buffers)[:300]]))
        return parts[-1]

    monkeypatch.setattr(os, "writev", write_little)
    write(tmp_path / "object")
    assert parts == [300]
    assert read(tmp_path / "object")
