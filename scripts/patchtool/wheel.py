# SPDX-License-Identifier: Apache-2.0
"""Makes a wheel: upstream's pinned wheel, plus the series, plus the overlay."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from .config import Layout, Pins, ToolError, load_pins, say
from .index import fetch
from .metadata import (
    common_requirements,
    file_tags,
    read_record,
    record_entry,
    record_text,
    rewrite_metadata,
    version_module,
    wheel_text,
)
from .tree import BUILD_INFO, Stamp, apply_patches, build_info, locked, sha256
from .wheelzip import WheelZip

PACKAGE = "vllm/"
VERSION_FILE = "vllm/_version.py"


def _stamp(layout: Layout, tag: str) -> Stamp:
    stamp = Stamp.load(layout.tree(tag))
    assert stamp is not None, "apply_patches() leaves one"
    return stamp


def _extensions_only(pins: Pins, device: str) -> bool:
    return device == "cpu" and pins.require_cpu().extensions_only


def package_files(layout: Layout, tag: str, device: str) -> dict[str, bytes | None]:
    """What an installed `vllm/` has otherwise than the base wheel.

    Path to content; None is a file that the series removes. Brings build/<tag>/src up
    to date first.
    """
    pins = load_pins(layout, tag)
    tree = apply_patches(layout, tag)
    stamp = _stamp(layout, tag)
    names = dict(stamp.written)
    if _extensions_only(pins, device):
        names = {**stamp.upstream, **names}
    files = {
        name: (tree / name).read_bytes() if digest else None
        for name, digest in names.items()
        if name.startswith(PACKAGE)
    }
    text = (tree / VERSION_FILE).read_text()
    files[VERSION_FILE] = version_module(text, pins.wheel_version(device)).encode()
    files[BUILD_INFO] = build_info(layout, pins, device)
    return files


def _check_base(layout: Layout, pins: Pins, wheel: zipfile.ZipFile) -> None:
    """A patch made on the sdist says nothing about a file that differs from it."""
    stamp, names = _stamp(layout, pins.tag), set(wheel.namelist())
    for name in sorted(n for n in stamp.written if n.startswith(PACKAGE)):
        found = sha256(wheel.read(name)) if name in names else None
        if found != stamp.upstream.get(name):
            raise ToolError(
                f"{name} of {Path(wheel.filename or '').name} is not the file of "
                f"{pins.sdist.file} that the series was made on, so a wheel would lose "
                "one side's changes; move the patch to another file, or pin another "
                "base wheel"
            )


def _dist_info(wheel: zipfile.ZipFile) -> str:
    found = {n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
    if len(found) != 1:
        raise ToolError(f"{wheel.filename} has {len(found)} dist-info folders, not one")
    return found.pop().removesuffix(".dist-info")


def build_wheel(
    layout: Layout, tag: str, device: str, arch: str, python: str | None = None
) -> Path:
    """Write build/wheels/vllm-<version>-<tags>.whl and return its path.

    The same inputs give the same bytes, on any machine.

    Raises:
        ToolError: nothing is pinned for device and arch, or a file that the series
            touches is not the sdist's in the base wheel.
    """
    pins = load_pins(layout, tag)
    pin = pins.base_wheel(device, arch, python)
    files = package_files(layout, tag, device)
    base = fetch(layout, pin)
    new = f"vllm-{pins.wheel_version(device)}"
    folder = layout.build / "wheels"
    result = folder / f"{new}-{file_tags(pin.file)}.whl"
    with locked(folder), zipfile.ZipFile(base) as wheel, base.open("rb") as raw:
        only = _extensions_only(pins, device)
        if not only:
            _check_base(layout, pins, wheel)
        old, info = _dist_info(wheel), f"{new}.dist-info"
        common = common_requirements(layout.tree(tag)) if only else []
        metadata = wheel.read(f"{old}.dist-info/METADATA").decode()
        metadata = rewrite_metadata(metadata, pins, device, common)
        files[f"{info}/METADATA"] = metadata.encode()
        files[f"{info}/WHEEL"] = wheel_text(pin.file).encode()
        files[f"{info}/RECORD"] = None  # made last
        kept = {
            name.replace(f"{old}.", f"{new}.", 1) if name.startswith(old) else name: m
            for name, m in ((m.filename, m) for m in wheel.infolist() if not m.is_dir())
            if not only or not name.startswith(PACKAGE) or name.endswith(".so")
        }
        kept = {name: member for name, member in kept.items() if name not in files}
        ours = {name: data for name, data in files.items() if data is not None}
        record = read_record(wheel.read(f"{old}.dist-info/RECORD").decode())
        entries = {name: record[member.filename] for name, member in kept.items()}
        entries |= {name: record_entry(data) for name, data in ours.items()}
        text = record_text(entries, f"{info}/RECORD")
        ours[f"{info}/RECORD"] = text.encode()

        say(f"writing {result.name}: {len(kept)} files of {pin.file}, {len(ours)} new")
        partial = result.with_name(f"{result.name}.partial")
        with WheelZip(partial) as out:
            # Installers want the metadata last, where they find it without a search.
            for name in sorted({*kept, *ours}, key=lambda n: (n.startswith(info), n)):
                if name in ours:
                    out.add(name, ours[name])
                else:
                    executable = kept[name].external_attr >> 16 & 0o100
                    mode = 0o100755 if executable else 0o100644
                    out.copy(name, raw, kept[name], mode)
        os.replace(partial, result)
    return result
