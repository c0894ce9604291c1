# SPDX-License-Identifier: Apache-2.0
"""Texts inside a wheel that say what it is: METADATA, WHEEL, RECORD, _version.py."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from .config import Pins, ToolError

# The extra that takes the requirements which exist for CUDA only.
MEDIA = "media"


def version_module(text: str, version: str) -> str:
    """`vllm/_version.py` with another version: its string and its tuple.

    Raises:
        ToolError: the two lines are not where upstream's build writes them.
    """
    public, _, local = version.partition("+")
    parts = [int(p) if p.isdigit() else p for p in public.split(".")]
    values = tuple([*parts, local] if local else parts)
    for left, value in (
        ("__version__ = version = ", version),
        ("__version_tuple__ = version_tuple = ", values),
    ):
        text, count = re.subn(f"^{left}.*$", f"{left}{value!r}", text, flags=re.M)
        if count != 1:
            raise ToolError(f"vllm/_version.py has no single line {left!r}")
    return text


def _project(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _as_extra(requirement: str) -> str:
    spec, _, marker = (part.strip() for part in requirement.partition(";"))
    extra = f'extra == "{MEDIA}"'
    return f"{spec}; ({marker}) and {extra}" if marker else f"{spec}; {extra}"


def cpu_requirements(
    base: list[str], common: list[str], torch: str, optional: tuple[str, ...]
) -> list[str]:
    """Requirements with which a CPU wheel installs from a plain package index.

    base: the base wheel's. common: those of the sdist whose Python tree goes into the
    wheel; projects that the base lacks are added, in any version, since what the sdist
    asks for may be newer than the base's other requirements allow. torch: pinned
    without a local version, so that a build `X+cpu` satisfies it too.
    """
    result = []
    for requirement in base:
        name = _project(requirement)
        if name in optional and "extra ==" not in requirement:
            result.append(_as_extra(requirement))
        elif name != "torch":
            result.append(requirement)
    present = set(map(_project, base))
    result += sorted({_project(r) for r in common} - present)
    return [*result, f"torch=={torch}"]


def common_requirements(tree: Path) -> list[str]:
    """Requirements of a source tree that hold for every device."""
    lines = (tree / "requirements" / "common.txt").read_text().splitlines()
    return [line.strip() for line in lines if _project(line.strip())]


def rewrite_metadata(text: str, pins: Pins, device: str, common: list[str]) -> str:
    """METADATA with our name and version and, for a CPU, its own requirements."""
    message: Message = HeaderParser().parsestr(text)
    message.replace_header("Name", "vllm")
    message.replace_header("Version", pins.wheel_version(device))
    if device == "cpu":
        cpu = pins.require_cpu()
        base = message.get_all("Requires-Dist", [])
        del message["Requires-Dist"]
        for line in cpu_requirements(base, common, cpu.torch, cpu.optional):
            message["Requires-Dist"] = line
        if cpu.optional:
            message["Provides-Extra"] = MEDIA
        message.replace_header("Requires-Python", cpu.requires_python)
    # Not str(message), which would fold long lines.
    head = "".join(f"{name}: {value}\n" for name, value in message.items())
    return f"{head}\n{message.get_payload()}"


def file_tags(file: str) -> str:
    """`cp38-abi3-manylinux_2_28_x86_64` of a wheel's file name."""
    return "-".join(file.removesuffix(".whl").split("-")[-3:])


def wheel_text(file: str) -> str:
    """WHEEL, with the tags of the file name; base wheels contradict theirs."""
    python, abi, system = file_tags(file).split("-")
    tags = [
        f"Tag: {p}-{a}-{s}\n"
        for p in python.split(".")
        for a in abi.split(".")
        for s in system.split(".")
    ]
    head = "Wheel-Version: 1.0\nGenerator: vllm-kv-tier\nRoot-Is-Purelib: false\n"
    return head + "".join(tags)


def read_record(text: str) -> dict[str, list[str]]:
    """RECORD as path to [hash, size]."""
    return {row[0]: row[1:] for row in csv.reader(io.StringIO(text))}


def record_entry(data: bytes) -> list[str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return [f"sha256={digest.decode()}", str(len(data))]


def record_text(entries: dict[str, list[str]], record: str) -> str:
    """RECORD of the entries and of itself, which has no hash."""
    out = io.StringIO()
    rows = [[name, *entries[name]] for name in sorted(entries)]
    csv.writer(out, lineterminator="\n").writerows([*rows, [record, "", ""]])
    return out.getvalue()
