# SPDX-License-Identifier: Apache-2.0
"""Keeps build/env/<tag>: a venv with the patched CPU build and what tests need."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .config import (
    CpuPins,
    Layout,
    ToolError,
    host_arch,
    load_pins,
    say,
    version_key,
)
from .index import (
    certificate,
    extra_index_urls,
    find_links,
    has_file,
    index_urls,
)
from .libraries import REPLACED, weaken, write_stubs
from .metadata import record_entry, record_text
from .tree import locked, sha256
from .wheel import build_wheel, package_files

STAMP = ".kv-tier-env.json"
REQUIREMENTS = Path("ci") / "requirements-test.txt"


def _run(command: list[str], env: dict[str, str], advice: str) -> None:
    result = subprocess.run(command, env=env, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise ToolError(f"`{' '.join(command[:4])} …` failed, see above; {advice}")


def find_uv(layout: Layout) -> str:
    """uv of the machine, else one in a venv of its own."""
    if found := shutil.which("uv"):
        return found
    tools = layout.build / "env" / "tools"
    uv = tools / "bin" / "uv"
    if not uv.is_file():
        say("installing uv")
        advice = "install python3-venv and pip, or uv itself"
        _run([sys.executable, "-m", "venv", str(tools)], dict(os.environ), advice)
        install = [str(tools / "bin" / "python"), "-m", "pip", "install", "-q", "uv"]
        _run(install, dict(os.environ), advice)
    return str(uv)


def python_for(cpu: CpuPins, arch: str, here: str) -> tuple[str, str]:
    """The Python that runs this if it will do, else a wish that uv looks for; and the
    tag of wheels for it. here: its version."""
    # Not at the top: most commands need none.
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        from pip._vendor.packaging.specifiers import (  # type: ignore[no-redef]
            SpecifierSet,
        )

    tag = "cp{}{}".format(*here.split("."))
    if SpecifierSet(cpu.requires_python).contains(here) and (
        arch in cpu.wheels or f"{arch}-{tag}" in cpu.wheels
    ):
        return sys.executable, tag
    pinned = [key for key in cpu.wheels if key.startswith(f"{arch}-cp")]
    if arch in cpu.wheels or not pinned:
        return cpu.requires_python, tag
    tag = max(pinned, key=version_key).removeprefix(f"{arch}-")
    return f"{tag[2]}.{tag[3:]}", tag


def _index_options() -> list[str]:
    """pip's settings for uv, which reads its own only."""
    main, *extra = index_urls()
    options = ["--default-index", main, "--index-strategy", "unsafe-best-match"]
    for url in extra_index_urls():
        options += ["--index", url]
    for link in find_links():
        options += ["--find-links", link]
    return options


def _needs_stubs(cpu: CpuPins) -> bool:
    """Whether there is a torch for CUDA only, whose libraries are not asked for."""
    if os.environ.get("KV_TIER_NVIDIA") == "1":
        return False
    return not has_file("torch", rf"torch-{re.escape(cpu.torch)}\+cpu-.*\.whl")


def _uv_environment() -> dict[str, str]:
    env = dict(os.environ, UV_NO_PROGRESS="1")
    env.pop("VIRTUAL_ENV", None)
    if path := certificate():
        env.setdefault("SSL_CERT_FILE", path)
    return env


def site_packages(venv: Path) -> Path:
    found = list(venv.glob("lib/python3.*/site-packages"))
    if not found:
        raise ToolError(f"{venv} is not a venv; remove it and run `make env` again")
    return found[0]


def _without_files(wheel: Path, folder: Path) -> Path:
    """Make a wheel that has the name and requirements of `wheel`, and no modules."""
    path = folder / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(path, "w") as result:
        (record,) = (n for n in whole.namelist() if n.endswith(".dist-info/RECORD"))
        entries = {}
        for name in ("METADATA", "WHEEL"):
            name = record.replace("RECORD", name)
            result.writestr(name, whole.read(name))
            entries[name] = record_entry(whole.read(name))
        result.writestr(record, record_text(entries, record))
    return path


def _digest(layout: Layout, tag: str) -> str:
    """Of all that a venv is made of, but the series and the overlay."""
    pins = load_pins(layout, tag)
    digest = hashlib.sha256(repr(pins).encode())
    digest.update("".join(pins.require_cpu().weak).encode())
    digest.update((layout.root / REQUIREMENTS).read_bytes())
    return digest.hexdigest()


def _load(venv: Path) -> dict[str, object]:
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def has_env(layout: Layout, tag: str) -> bool:
    """Whether there is a venv, and vLLM has started in it."""
    return "digest" in _load(layout.env(tag))


def sync(layout: Layout, tag: str) -> None:
    """Copy changed files of the series and the overlay into the venv.

    Raises:
        ToolError: there is no venv yet.
    """
    venv = layout.env(tag)
    if not has_env(layout, tag):
        raise ToolError(f"no environment for {tag}; run `make env TAG={tag}` first")
    files = package_files(layout, tag, "cpu")
    with locked(venv.parent):
        _sync(layout, tag, files)


def _sync(layout: Layout, tag: str, files: dict[str, bytes | None]) -> None:
    venv = layout.env(tag)
    site, state = site_packages(venv), _load(venv)
    before: dict[str, str | None] = state.get("files", {})  # type: ignore[assignment]
    after = {name: None if d is None else sha256(d) for name, d in files.items()}
    wanted = dict(files)
    for name in before.keys() - after.keys():
        # No longer touched: upstream's file, or none.
        source = layout.tree(tag) / name
        wanted[name] = source.read_bytes() if source.is_file() else None
    changed = 0
    for name, data in wanted.items():
        path = site / name
        if data is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.partial")
            partial.write_bytes(data)
            os.replace(partial, path)
            changed += 1
    (venv / STAMP).write_text(json.dumps({**state, "files": after}))
    if changed:
        say(f"{tag}: {changed} files updated in {venv.relative_to(layout.root)}")


def _first_start(venv: Path) -> None:
    """Show that it runs; the bytecode that this leaves makes later starts fast."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    vllm = str(venv / "bin" / "vllm")
    command = [vllm, "--version"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        raise ToolError(f"{vllm} --version fails:\n{result.stderr[-2000:]}")
    # Some releases print warnings first.
    say(f"installed vLLM {result.stdout.split()[-1]}")


def make_env(layout: Layout, tag: str) -> Path:
    """Make build/env/<tag>, or bring it up to date; instant if it is.

    Raises:
        ToolError: no CPU build is pinned, or an installation fails.
    """
    pins = load_pins(layout, tag)
    cpu = pins.require_cpu()
    venv = layout.env(tag)
    digest = _digest(layout, tag)
    if _load(venv).get("digest") != digest:
        python, python_tag = python_for(cpu, host_arch(), platform.python_version())
        wheel = build_wheel(layout, tag, "cpu", host_arch(), python_tag)
        files = package_files(layout, tag, "cpu")
        with locked(venv.parent):
            uv, env = find_uv(layout), _uv_environment()
            say(f"installing {wheel.name} and what it needs (about 2 GiB)")
            shutil.rmtree(venv, ignore_errors=True)
            advice = f"vLLM for a CPU needs Python {cpu.requires_python}"
            create = ["venv", "--quiet", "--python", python, str(venv)]
            _run([uv, *create], env, advice)
            target = ["--quiet", "--python", str(venv / "bin" / "python")]
            what = [str(_without_files(wheel, venv))]
            what += ["-r", str(layout.root / REQUIREMENTS)]
            what += cpu.also
            stubs = _needs_stubs(cpu)
            if stubs:
                never = venv / "not-installed.txt"
                lines = [f'{name}; sys_platform == "never"' for name in REPLACED]
                never.write_text("\n".join(lines))
                what += ["--override", str(never)]
            advice = "check the network and the room on the disk, then run it again"
            _run([uv, "pip", "install", *target, *_index_options(), *what], env, advice)
            # Then its files, since uv keeps 0.5 GiB of each wheel that it resolves.
            alone = ["--no-deps", "--no-cache", "--reinstall", str(wheel)]
            _run([uv, "pip", "install", *target, *alone], env, advice)
            if stubs:
                write_stubs(site_packages(venv) / "torch" / "lib")
            for library in site_packages(venv).glob("vllm/*.so"):
                weaken(library, cpu.weak)
            # The digest comes last: what never started is made anew.
            (venv / STAMP).write_text(json.dumps({"files": {}}))
            _sync(layout, tag, files)
            _first_start(venv)
            (venv / STAMP).write_text(json.dumps({**_load(venv), "digest": digest}))
    else:
        sync(layout, tag)
    return venv
