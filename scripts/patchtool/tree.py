# SPDX-License-Identifier: Apache-2.0
"""Builds `build/<tag>/src`: the sdist, the series pushed, the overlay copied in."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .config import (
    Layout,
    Pins,
    ToolError,
    load_pins,
    overlay_files,
    read_series,
    say,
)
from .index import fetch, sha256_file
from .quilt import applied, push_all

STAMP = ".kv-tier-stamp.json"
BUILD_INFO = "vllm/v1/kv_tier/build_info.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works on a folder of build/; the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def overlay_digest(layout: Layout) -> str:
    digest = hashlib.sha256()
    for name, path in overlay_files(layout).items():
        digest.update(f"{name}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def build_info(layout: Layout, pins: Pins, device: str) -> bytes:
    """What `vllm.v1.kv_tier.about()` shows. device: source, cuda or cpu."""
    version = pins.wheel_version("cpu" if device == "cpu" else "cuda")
    info = {
        "tag": pins.tag,
        "version": version,
        "device": device,
        "patches": [
            {"name": p.name, "sha256": sha256_file(p.path)}
            for p in read_series(layout, pins.tag)
        ],
        "overlay_sha256": overlay_digest(layout),
    }
    return (json.dumps(info, indent=2) + "\n").encode()


@dataclass
class Stamp:
    """What the tool wrote into a tree, so that it can tell edits from its own work.

    upstream: sha256 of every file of the sdist. written: sha256 of the files that the
    series and the overlay changed or added, None where they removed one. stat: size
    and mtime in ns at that time, which saves hashing.
    """

    sdist: str
    digest: str = ""
    upstream: dict[str, str] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)
    stat: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, tree: Path) -> Stamp | None:
        try:
            return cls(**json.loads((tree / STAMP).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, tree: Path) -> None:
        partial = tree / f"{STAMP}.partial"
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, tree / STAMP)

    def expected(self) -> dict[str, str]:
        merged = {**self.upstream, **self.written}
        return {name: value for name, value in merged.items() if value is not None}


def _scan(tree: Path) -> dict[str, list[int]]:
    """Size and mtime of every file that is not quilt's, Python's or the tool's own."""
    found: dict[str, list[int]] = {}
    for folder, subfolders, names in os.walk(tree):
        subfolders[:] = [s for s in subfolders if s not in (".pc", "__pycache__")]
        prefix = os.path.relpath(folder, tree)
        for name in names:
            if name.startswith(STAMP) or name.endswith(".pyc"):
                continue
            info = os.lstat(os.path.join(folder, name))
            path = name if prefix == "." else f"{prefix}/{name}"
            found[path] = [info.st_size, info.st_mtime_ns]
    return found


def _hash(tree: Path, name: str) -> str:
    path = tree / name
    if path.is_symlink():
        return sha256(os.readlink(path).encode())
    return sha256_file(path)


def edited_files(tree: Path, stamp: Stamp) -> dict[str, str | None]:
    """Files that differ from what the tool wrote; None where one was deleted."""
    found, expected = _scan(tree), stamp.expected()
    edits: dict[str, str | None] = {n: None for n in expected.keys() - found.keys()}
    for name, stat in found.items():
        if stamp.stat.get(name) != stat:
            digest = _hash(tree, name)
            if digest != expected.get(name):
                edits[name] = digest
    return edits


def unpack(sdist: Path, target: Path, members: Iterable[str] = ()) -> None:
    """Unpack an sdist without its top folder; only some members if any are named."""
    target.mkdir(parents=True, exist_ok=True)
    top = sdist.name.removesuffix(".tar.gz")
    command = ["tar", "-xzf", str(sdist), "-C", str(target), "--strip-components=1"]
    command += ["--no-same-owner", *(f"{top}/{name}" for name in members)]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    if result.returncode:
        raise ToolError(f"cannot unpack {sdist}: {result.stderr.strip()}")


def _unpack_upstream(layout: Layout, pins: Pins) -> Stamp:
    """Put the plain sdist at build/<tag>/src, with a stamp that says just that."""
    sdist = fetch(layout, pins.sdist)
    tree = layout.tree(pins.tag)
    partial = tree.with_name("src.partial")
    shutil.rmtree(partial, ignore_errors=True)
    say(f"unpacking {sdist.name} to {tree.relative_to(layout.root)}")
    unpack(sdist, partial)
    stat = _scan(partial)
    upstream = {name: _hash(partial, name) for name in stat}
    stamp = Stamp(pins.sdist.sha256, upstream=upstream, stat=stat)
    stamp.save(partial)
    partial.rename(tree)
    return stamp


def series_digest(layout: Layout, pins: Pins) -> str:
    """Changes whenever the tree would."""
    digest = hashlib.sha256(pins.sdist.sha256.encode())
    digest.update(layout.quiltrc.read_bytes())
    digest.update(build_info(layout, pins, "source"))
    return digest.hexdigest()


def touched_files(layout: Layout, tag: str) -> list[str]:
    return sorted({f for patch in read_series(layout, tag) for f in patch.files})


def _stage(layout: Layout, pins: Pins, stage: Path, upstream: dict[str, str]) -> None:
    """Apply the series and the overlay to a folder of only the files they touch."""
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    touched = [f for f in touched_files(layout, pins.tag) if f in upstream]
    if touched:
        unpack(fetch(layout, pins.sdist), stage, touched)
    if read_series(layout, pins.tag):
        push_all(layout, pins.tag, stage)
    for name, source in overlay_files(layout).items():
        if name in upstream or (stage / name).exists():
            raise ToolError(
                f"overlay file {name} exists in upstream {pins.tag} or in its series; "
                "rename it: the overlay only adds files"
            )
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, stage / name)
    info = stage / BUILD_INFO
    info.parent.mkdir(parents=True, exist_ok=True)
    info.write_bytes(build_info(layout, pins, "source"))


def _refuse_lost_edits(
    layout: Layout, tag: str, edits: dict[str, str | None], wanted: dict[str, str]
) -> None:
    lost = sorted(name for name, found in edits.items() if found != wanted.get(name))
    if not lost:
        return
    tree = layout.tree(tag)
    done, all_ = len(applied(tree)), len(read_series(layout, tag))
    shown = "".join(f"\n  {name}" for name in lost[:10])
    more = f"\n  and {len(lost) - 10} more" if len(lost) > 10 else ""
    quilt = f"make quilt TAG={tag} ARGS="
    raise ToolError(
        f"{tree.relative_to(layout.root)} has files that this tool did not write, and "
        f"going on would lose them ({done} of {all_} patches are applied there):"
        f"{shown}{more}\n"
        f"Keep them: `{quilt}refresh` puts edits of patched files into the top patch, "
        f"`{quilt}'push -a'` applies what is popped, and overlay files are edited in "
        f"vllm_overlay/. Lose them: run the same command with FORCE=1."
    )


def _install(tree: Path, stage: Path, written: Iterable[str], old: Stamp) -> None:
    """Move the staged files into the tree, and undo what is no longer staged."""
    for name in written:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (stage / name).exists():
            os.replace(stage / name, tree / name)
        else:
            (tree / name).unlink(missing_ok=True)
    for name in old.written.keys() - set(written) - old.upstream.keys():
        (tree / name).unlink(missing_ok=True)
    shutil.rmtree(tree / ".pc", ignore_errors=True)
    if (stage / ".pc").is_dir():
        os.replace(stage / ".pc", tree / ".pc")


def pristine_tree(layout: Layout, tag: str) -> Path:
    """build/<tag>/src as it is, or the plain sdist if there is none yet."""
    tree = layout.tree(tag)
    with locked(tree.parent):
        if not tree.exists():
            _unpack_upstream(layout, load_pins(layout, tag))
    return tree


def upstream_tree(layout: Layout, tag: str) -> Path:
    """build/<tag>/upstream: the pinned sdist without series and overlay."""
    pin = load_pins(layout, tag).sdist
    tree = layout.tree(tag).with_name("upstream")
    stamp = tree / STAMP
    with locked(tree.parent):
        if not stamp.is_file() or stamp.read_text() != pin.sha256:
            partial = tree.with_name("upstream.partial")
            for folder in (partial, tree):
                shutil.rmtree(folder, ignore_errors=True)
            unpack(fetch(layout, pin), partial)
            (partial / STAMP).write_text(pin.sha256)
            partial.rename(tree)
    return tree


def _open_tree(layout: Layout, pins: Pins, force: bool) -> Stamp:
    """The stamp of a tree of the pinned sdist, unpacked if there is none."""
    tree = layout.tree(pins.tag)
    stamp = Stamp.load(tree)
    if stamp is not None and stamp.sdist == pins.sdist.sha256:
        return stamp
    if tree.exists() and not force:
        if stamp is None:
            raise ToolError(
                f"{tree} was not made by this tool, or its stamp {STAMP} was removed; "
                "use FORCE=1 to make it anew (its content is lost)"
            )
        if edited_files(tree, stamp):
            raise ToolError(
                f"{tree} holds edits on another sdist than the pinned one; use FORCE=1 "
                "to make it anew (the edits are lost)"
            )
    shutil.rmtree(tree, ignore_errors=True)
    return _unpack_upstream(layout, pins)


def apply_patches(layout: Layout, tag: str, force: bool = False) -> Path:
    """Bring build/<tag>/src up to date with the pins, the series and the overlay.

    Does nothing if it is; repairs what an interruption left; never overwrites an edit
    made there, unless forced.

    Raises:
        ToolError: an edit would be lost, a patch does not apply, or a fetch fails.
    """
    pins = load_pins(layout, tag)
    tree = layout.tree(tag)
    with locked(tree.parent):
        stamp = _open_tree(layout, pins, force)
        digest = series_digest(layout, pins)
        edits = edited_files(tree, stamp)
        names = [p.name for p in read_series(layout, tag)]
        if stamp.digest == digest and not edits and applied(tree) == names:
            return tree

        stage = tree.with_name("src.stage")
        _stage(layout, pins, stage, stamp.upstream)
        # Files that only an earlier series, or a lost edit, changed are upstream's.
        touched = touched_files(layout, tag)
        undone = stamp.written.keys() | (edits.keys() if force else set())
        restored = sorted(undone & stamp.upstream.keys() - set(touched))
        if restored:
            unpack(fetch(layout, pins.sdist), stage, restored)
        written = [*touched, *overlay_files(layout), BUILD_INFO]
        new = Stamp(pins.sdist.sha256, digest, stamp.upstream)
        for name in written:
            new.written[name] = _hash(stage, name) if (stage / name).exists() else None
        if force:
            for name in edits.keys() - new.expected().keys():
                (tree / name).unlink(missing_ok=True)
        else:
            _refuse_lost_edits(layout, tag, edits, new.expected())
        _install(tree, stage, [*written, *restored], stamp)
        new.stat = _scan(tree)
        new.save(tree)
        shutil.rmtree(stage, ignore_errors=True)
    say(
        f"{tag}: {len(names)} patches and {len(overlay_files(layout))} overlay files "
        f"applied in {tree.relative_to(layout.root)}"
    )
    return tree
