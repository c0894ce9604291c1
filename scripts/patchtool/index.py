# SPDX-License-Identifier: Apache-2.0
"""Asks the package index that pip is configured for which files it has, and downloads
pinned ones into a cache that `make clean` does not touch."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from html.parser import HTMLParser
from http.client import HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from .config import Layout, Pin, ToolError, say

CHUNK = 1 << 20
PROGRESS_STEP = 64 << 20


@dataclass(frozen=True)
class IndexFile:
    name: str
    url: str
    sha256: str


@lru_cache(maxsize=1)
def pip_config() -> dict[str, str]:
    """pip's settings by option name, from its files and its environment variables."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    found: dict[str, str] = {}
    # Later lines are stronger: global, user, site, then the environment (":env:").
    lines = sorted(result.stdout.splitlines(), key=lambda line: line.startswith(":env"))
    for line in lines:
        if match := re.match(r"^(?:[\w-]+|:env:)\.([\w-]+)='(.*)'$", line):
            found[match[1]] = match[2].replace("\\n", " ")
    return found


def index_urls() -> list[str]:
    """The configured index, else pip's own default, then the extra ones."""
    main = os.environ.get("PIP_INDEX_URL") or pip_config().get("index-url")
    if not main:
        # pip knows where it looks when nothing is configured.
        code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        main = result.stdout.strip()
    if not main:
        raise ToolError(
            "no package index: PIP_INDEX_URL is not set and "
            f"`{sys.executable} -m pip` does not run; install pip or set PIP_INDEX_URL"
        )
    return [main, *extra_index_urls()]


def extra_index_urls() -> list[str]:
    """Extra indexes that can be asked over HTTP."""
    urls = pip_config().get("extra-index-url", "").split()
    return [url for url in urls if url.startswith(("http://", "https://"))]


def find_links() -> list[str]:
    return pip_config().get("find-links", "").split()


def certificate() -> str | None:
    return pip_config().get("cert")


def open_url(url: str, accept: str = "*/*") -> HTTPResponse:
    """Open a URL; a user name and password in it become a header.

    Raises:
        OSError: the host or the file cannot be reached.
    """
    parts = urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "vllm-kv-tier-patchtool"}
    if "@" in parts.netloc:
        login, host = parts.netloc.rsplit("@", 1)
        token = base64.b64encode(unquote(login).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        url = urlunsplit(parts._replace(netloc=host))
    context = ssl.create_default_context(cafile=certificate())
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=60, context=context)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.hrefs.append(href)


def _page_of(index: str, project: str) -> list[IndexFile]:
    """The files on a project's page of the simple API (PEP 503)."""
    base = f"{index.rstrip('/')}/{project}/"
    links = _Links()
    with open_url(base, "text/html") as page:
        links.feed(page.read().decode())
    files = []
    for href in links.hrefs:
        url, fragment = urldefrag(urljoin(base, href))
        if fragment.startswith("sha256="):
            name = unquote(url.rsplit("/", 1)[1])
            files.append(IndexFile(name, url, fragment[len("sha256=") :]))
    return files


def project_files(project: str) -> list[IndexFile]:
    """All files of a project over the configured indexes.

    Raises:
        ToolError: no index answered.
    """
    files: list[IndexFile] = []
    errors: list[str] = []
    for index in index_urls():
        host = urlsplit(index).hostname or index
        try:
            files += _page_of(index, project)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            errors.append(f"{host}: {reason}")
    if not files:
        raise ToolError(
            f"cannot ask the package index for {project!r} ({'; '.join(errors)}); "
            "check the network, or point PIP_INDEX_URL at an index that is reachable"
        )
    return files


def has_file(project: str, pattern: str) -> bool:
    """Whether the indexes or pip's local folders have a file of that name."""
    local = (file.name for folder in _local_folders() for file in folder.iterdir())
    if any(re.fullmatch(pattern, name) for name in local):
        return True
    return any(re.fullmatch(pattern, file.name) for file in project_files(project))


def local_file(name: str) -> Path | None:
    """A file of that name in one of pip's local find-links folders."""
    files = (folder / name for folder in _local_folders())
    return next((file for file in files if file.is_file()), None)


def _local_folders() -> list[Path]:
    """Pip's find-links that are folders here."""
    folders = (Path(link.removeprefix("file://")) for link in find_links())
    return [folder for folder in folders if folder.is_dir()]


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _copy(source: BinaryIO, target: BinaryIO, name: str, total: int) -> str:
    """Copy and hash; a line for every 64 MiB, so that a long wait is not silent."""
    digest, done, shown = hashlib.sha256(), 0, 0
    while chunk := source.read(CHUNK):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        if done - shown >= PROGRESS_STEP:
            shown = done
            of = f" of {total >> 20}" if total else ""
            say(f"  {name}: {done >> 20}{of} MiB")
    return digest.hexdigest()


def _source(pin: Pin) -> tuple[BinaryIO, int, str]:
    """An open stream of the pinned file, its size (0: unknown), where it is from."""
    if path := local_file(pin.file):
        return path.open("rb"), path.stat().st_size, str(path)
    for file in project_files(pin.project):
        if file.name == pin.file:
            response = open_url(file.url)
            return response, int(response.headers.get("content-length") or 0), file.url
    raise ToolError(
        f"the package index has no {pin.file} in project {pin.project!r}; "
        "check the pin in upstream.toml, or set PIP_INDEX_URL to an index that has it"
    )


def fetch(layout: Layout, pin: Pin) -> Path:
    """Path of the pinned file in the cache, downloaded and hash checked if need be.

    Raises:
        ToolError: network failure, or the content does not have the pinned hash.
    """
    # The hash is part of the path: a changed pin can never meet an old file.
    target = layout.cache / pin.sha256[:16] / pin.file
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {pin.file}")
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as out:
            stream, size, origin = _source(pin)
            with stream:
                found = _copy(stream, out, pin.file, size)
        if found != pin.sha256:
            raise ToolError(
                f"{pin.file} from {origin} has sha256 {found}, but upstream.toml pins "
                f"{pin.sha256}; nothing was kept. Try again, and distrust the index "
                "if it stays so"
            )
        os.replace(partial, target)
    except OSError as error:
        raise ToolError(
            f"cannot fetch {pin.file}: {error}; check the network and the room in "
            f"{layout.cache}, or set PIP_INDEX_URL, then run the same command again"
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return target
