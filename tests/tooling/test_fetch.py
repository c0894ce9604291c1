# SPDX-License-Identifier: Apache-2.0
"""Downloads: whole and right, or one clear error and nothing kept."""

import hashlib

import pytest

from patchtool.config import Pin, ToolError
from patchtool.index import fetch
from tests.tooling.project import Index, Project

NAME = "vllm-2.0.0.tar.gz"


def pin_of(content: bytes) -> Pin:
    return Pin(NAME, hashlib.sha256(content).hexdigest())


def test_download_then_cache(
    project: Project, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.publish("vllm", {NAME: b"content"})
    path = fetch(project.layout, pin_of(b"content"))
    assert path.read_bytes() == b"content"
    assert project.layout.cache in path.parents
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert fetch(project.layout, pin_of(b"content")) == path


def test_wrong_hash_keeps_nothing(project: Project, index: Index) -> None:
    index.publish("vllm", {NAME: b"something else"})
    pin = pin_of(b"content")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ToolError) as error:
        fetch(project.layout, pin)
    for part in (NAME, found, pin.sha256, index.url):
        assert part in str(error.value)
    assert not list((project.layout.cache / pin.sha256[:16]).iterdir())


def test_unreachable_index_names_it_and_the_setting(project: Project) -> None:
    with pytest.raises(ToolError, match=r"127\.0\.0\.1.*PIP_INDEX_URL"):
        fetch(project.layout, pin_of(b"content"))


def test_file_that_the_index_lacks(project: Project, index: Index) -> None:
    index.publish("vllm", {"vllm-1.9.0.tar.gz": b""})
    with pytest.raises(ToolError, match=f"no {NAME} in project 'vllm'"):
        fetch(project.layout, pin_of(b"content"))
