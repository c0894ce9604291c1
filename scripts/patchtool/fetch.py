# SPDX-License-Identifier: Apache-2.0
"""Downloads pinned files into a cache that `make clean` does not touch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from .config import Layout, Pin, ToolError, say
from .index import local_file, open_url, project_files

CHUNK = 1 << 20
PROGRESS_STEP = 64 << 20


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
