# SPDX-License-Identifier: Apache-2.0
"""A checkout in a temporary folder, and a package index on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.tooling.project import Index, Project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two patches on upstream 1.0.0, all files cached: no network is used."""
    # Nothing listens there: a request that should not be made fails at once.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    return Project.create(tmp_path / "checkout", tmp_path / "cache")


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A package index that serves what a test puts there."""
    folder = tmp_path / "index"
    folder.mkdir()

    def handler(*args: object) -> Handler:
        return Handler(*args, directory=str(folder))

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PIP_INDEX_URL", url)
    yield Index(folder, url)
    server.shutdown()
    server.server_close()
    thread.join()
