# SPDX-License-Identifier: Apache-2.0
"""The steps of a release; .github/workflows/release.yml only calls them.

    PYTHONPATH=scripts python3 ci/release.py COMMAND

On this machine, without a forge: `wheels`, `sums` and `index` make a folder
build/release that pip installs from, and `try` does so.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import quote

from patchtool.config import (
    Layout,
    Pin,
    Pins,
    ToolError,
    exit_with,
    host_arch,
    load_pins,
    say,
    version_key,
)
from patchtool.index import sha256_file
from patchtool.metadata import read_record
from patchtool.pins import ARCHES
from patchtool.tagspage import FROZEN
from patchtool.tree import BUILD_INFO
from patchtool.wheel import build_wheel

SUMS = "SHA256SUMS"
DEVICES = ("cuda", "cpu")
UNRELEASED = "is not released yet"
"""What README.md says of a version until its tag is made."""
FIRST_ANSWER = Path(__file__).with_name("first_answer.py")


def folder_of(layout: Layout) -> Path:
    """What a release has to download."""
    return layout.build / "release"


def command(line: Iterable[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Run a program; its output to stdout.

    Raises:
        ToolError: it cannot be started, or fails.
    """
    words = [str(word) for word in line]
    try:
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise ToolError(f"cannot run {words[0]}: {error}") from error
    if done.returncode:
        say(done.stdout)
        raise ToolError(f"`{' '.join(words)}` failed")
    return done.stdout


# -------------------------------------------------------------------- what is built


def why_not(layout: Layout, tag: str, device: str) -> str:
    """Why a release of vLLM has no wheel for a device; empty where it has one."""
    if tag in FROZEN:
        return "frozen; `make wheel` builds it"
    pins = load_pins(layout, tag)
    if device == "cuda":
        return "" if pins.cuda else "no wheel of upstream is pinned"
    if pins.cpu is None or pins.cpu.extensions_only:
        return "there is no CPU build of this release"
    if pins.cpu.also or pins.cpu.weak:
        return "pip alone does not install what it needs"
    return ""


def chosen(
    layout: Layout, tags: list[str], devices: list[str]
) -> list[tuple[str, str]]:
    """Releases and devices to build for: what is named, else all that can be.

    Raises:
        ToolError: one is named that has no wheel.
    """
    found = []
    for tag in tags or layout.tags():
        for device in devices or DEVICES:
            if not (reason := why_not(layout, tag, device)):
                found.append((tag, device))
            elif tags and devices:
                raise ToolError(f"{tag} has no {device} wheel: {reason}")
    return found


def left_out(layout: Layout) -> list[str]:
    """A line for each wheel that a release lacks, with the reason."""
    cases = [(tag, device) for tag in layout.tags() for device in DEVICES]
    return [
        f"{tag}, {device}: {reason}"
        for tag, device in cases
        if (reason := why_not(layout, tag, device))
    ]


def plan(layout: Layout) -> None:
    """Print the jobs of the workflow, as the outputs of a step."""
    jobs = [{"tag": t, "device": d} for t, d in chosen(layout, [], [])]
    images = [job["tag"] for job in jobs if job["device"] == "cuda"]
    print(f"wheels={json.dumps(jobs)}", f"images={json.dumps(images)}", sep="\n")
    for line in left_out(layout):
        print(f"not built: {line}", file=sys.stderr)


def pinned(pins: Pins, device: str) -> dict[str, Pin]:
    return pins.cuda if device == "cuda" else pins.require_cpu().wheels


def put(path: Path, folder: Path) -> None:
    """Have a file in another folder of build/ too; no copy, for they are large."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / path.name).unlink(missing_ok=True)
    (folder / path.name).hardlink_to(path)


def build(layout: Layout, what: list[tuple[str, str]], arches: list[str]) -> None:
    """Build wheels into build/release/, for every architecture if none is named."""
    for tag, device in what:
        for key in pinned(load_pins(layout, tag), device):
            arch, _, python = key.partition("-")
            if arches and arch not in arches:
                continue
            path = build_wheel(layout, tag, device, arch, python or None)
            put(path, folder_of(layout))
            say(f"{path.name}  sha256 {sha256_file(path)}")


def reproduce(layout: Layout, options: argparse.Namespace) -> None:
    """Build the same wheels elsewhere and compare them with those in build/release/.

    In another folder, from files of another age, with another umask, time zone, locale
    and hash seed.

    Raises:
        ToolError: a wheel differs, or was not built before.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "another checkout"
        for path in (layout.patches, layout.overlay):
            # Contents only: all files are as old as the copy.
            shutil.copytree(path, root / path.name, copy_function=shutil.copyfile)
        shutil.copyfile(layout.root / "VERSION", root / "VERSION")
        env = {"KV_TIER_ROOT": str(root), "TZ": "Asia/Kolkata", "LC_ALL": "C"}
        line = [sys.executable, __file__, "wheels"]
        for name in ("tags", "devices", "arches"):
            if value := getattr(options, name):
                line += [f"--{name}", *value]
        before = os.umask(0o077)
        try:
            say(command(line, {**os.environ, **env, "PYTHONHASHSEED": "1"}))
        finally:
            os.umask(before)
        built = sorted((root / "build" / "release").glob("*.whl"))
        for path in built:
            first = folder_of(layout) / path.name
            if not first.is_file():
                raise ToolError(f"{path.name} is not in {first.parent}; build it first")
            if sha256_file(first) != sha256_file(path):
                raise ToolError(f"{path.name} has other bytes when it is built again")
    say(f"wheels with the same bytes when they are built again: {len(built)}")


# ------------------------------------------------------------------ version, changes


def section(layout: Layout) -> tuple[str, str]:
    """Heading and text of the version's part of CHANGELOG.md.

    Raises:
        ToolError: it has none.
    """
    text = (layout.root / "CHANGELOG.md").read_text()
    pattern = rf"^## ({re.escape(layout.version)}\b[^\n]*)\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, text, re.M | re.S)
    if not found:
        raise ToolError(f"CHANGELOG.md has no section `## {layout.version}, DATE`")
    return found[1].strip(), found[2].strip()


def check(layout: Layout, tag: str) -> None:
    """Whether a tag may be released from this checkout.

    Raises:
        ToolError: it is not the version, or the changelog has no date for it.
    """
    version = layout.version
    if tag != version:
        raise ToolError(f"the tag is {tag}, but the file VERSION says {version}")
    heading, text = section(layout)
    if not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", heading):
        raise ToolError(
            f"CHANGELOG.md says `## {heading}`; a release has a date there, as "
            f"`## {version}, 2026-01-31`"
        )
    if not text:
        raise ToolError(f"CHANGELOG.md says nothing of {version}")
    if UNRELEASED in (layout.root / "README.md").read_text():
        raise ToolError(f"README.md still says `{UNRELEASED}`")
    say(f"{tag} may be released")


# --------------------------------------------------------------- what is in a wheel


@dataclass(frozen=True)
class Wheel:
    """A wheel that this project built. info: its `build_info.json`."""

    path: Path
    info: dict[str, object]
    metadata: Message
    files: dict[str, str]
    """SHA-256 in hexadecimal of each file in RECORD."""

    @property
    def tag(self) -> str:
        return str(self.info["tag"])

    @property
    def version(self) -> str:
        return str(self.info["version"])

    @property
    def device(self) -> str:
        return str(self.info["device"])

    @property
    def arch(self) -> str:
        return next(arch for arch in ARCHES if self.path.stem.endswith(arch))

    def base(self, layout: Layout) -> Pin:
        """Upstream's wheel that it was made of."""
        system = self.path.stem.split("-", 2)[2]
        pins = load_pins(layout, self.tag)
        found = [
            pin
            for pin in pinned(pins, self.device).values()
            if pin.file.endswith(f"-{system}.whl")
        ]
        if len(found) != 1:
            raise ToolError(f"no wheel like {self.path.name} is pinned for {self.tag}")
        return found[0]


def _hex(entry: str) -> str:
    """The digest of a line of RECORD."""
    return urlsafe_b64decode(entry.removeprefix("sha256=") + "==").hex()


def read_wheel(path: Path) -> Wheel:
    """Raise a ToolError for a wheel that this project did not build."""
    with zipfile.ZipFile(path) as members:
        names = members.namelist()
        if BUILD_INFO not in names:
            raise ToolError(f"{path.name} was not built by this project")
        info = json.loads(members.read(BUILD_INFO))
        (record,) = (n for n in names if n.endswith(".dist-info/RECORD"))
        text = members.read(record.replace("RECORD", "METADATA")).decode()
        rows = read_record(members.read(record).decode())
    files = {name: _hex(row[0]) for name, row in rows.items() if row[0]}
    return Wheel(path, info, HeaderParser().parsestr(text), files)


def wheels_in(layout: Layout) -> list[Wheel]:
    """What is in build/release/, the newest release of vLLM first.

    Raises:
        ToolError: nothing is.
    """
    found = [read_wheel(path) for path in sorted(folder_of(layout).glob("*.whl"))]
    if not found:
        raise ToolError(f"{folder_of(layout)} has no wheel; run `wheels` first")
    return sorted(found, key=lambda w: version_key(w.tag), reverse=True)


def sums(layout: Layout) -> None:
    """Write SHA256SUMS, which `sha256sum -c` reads."""
    folder = folder_of(layout)
    paths = sorted(p for p in folder.iterdir() if p.is_file() and p.name != SUMS)
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines))
    say(f"files in {SUMS}: {len(lines)}")


# ------------------------------------------------------------------ for pip, for users


def index(layout: Layout, folders: list[Path], out: Path, url: str) -> None:
    """Write a simple index (PEP 503), with hashes, of releases' wheels.

    Args:
        layout: of this checkout.
        folders: of releases, each with a SHA256SUMS; build/release/ if none is named.
        out: the folder that pip gets as an index.
        url: where the folders can be downloaded from; relative links if empty.

    Raises:
        ToolError: a folder has no SHA256SUMS.
    """
    page = out / "vllm" / "index.html"
    links = []
    for folder in folders or [folder_of(layout)]:
        if not (folder / SUMS).is_file():
            raise ToolError(f"{folder} has no {SUMS}; run `sums` first")
        where = Path(os.path.relpath(folder, page.parent)).as_posix()
        where = f"{url.rstrip('/')}/{quote(folder.name)}" if url else quote(where)
        for line in (folder / SUMS).read_text().splitlines():
            digest, name = line.split("  ", 1)
            if name.endswith(".whl"):
                href = html.escape(f"{where}/{quote(name)}#sha256={digest}")
                links.append(f'<a href="{href}">{html.escape(name)}</a><br>\n')
    if not links:
        raise ToolError(f"no {SUMS} names a wheel, so the index would be empty")
    page.parent.mkdir(parents=True, exist_ok=True)
    head = '<!DOCTYPE html>\n<meta charset="utf-8">\n<title>{}</title>\n'
    (out / "index.html").write_text(
        head.format("Index for pip") + '<a href="vllm/">vllm</a>\n'
    )
    page.write_text(head.format("vllm") + "".join(links))
    say(f"wheels in {out}: {len(links)}")


def notes(layout: Layout, out: Path, url: str) -> None:
    """Write what users read on the page of a release; url: its index for pip."""
    rows = [
        "| vLLM | device | machine | Python | wheel | MB |",
        "|---|---|---|---|---|---|",
    ]
    wheels = wheels_in(layout)
    for wheel in wheels:
        cells = [wheel.tag, wheel.device, wheel.arch]
        cells += [str(wheel.metadata["Requires-Python"]), f"`{wheel.path.name}`"]
        cells += [str(round(wheel.path.stat().st_size / 1e6))]
        rows.append(f"| {' | '.join(cells)} |")
    install = [f"    pip install vllm=={wheels[0].version} --extra-index-url {url}", ""]
    text = [section(layout)[1], "", "## Wheels", "", *(install if url else []), *rows]
    text += ["", *(f"- Not built: {line}." for line in left_out(layout))]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(text) + "\n")


def published(layout: Layout) -> None:
    """Fetch SHA256SUMS of each release of the forge into build/releases/VERSION/."""
    line = (
        "gh release list --exclude-drafts --limit 1000 --json tagName --jq .[].tagName"
    )
    for tag in command(line.split()).split():
        if re.fullmatch(r"core\.\d+", tag):
            folder = layout.build / "releases" / tag
            get = ["gh", "release", "download", tag, "--clobber", "--pattern", SUMS]
            command([*get, "--dir", folder])


# ------------------------------------------------------------------------------ image


def image(layout: Layout, tag: str, repository: str) -> None:
    """Build deploy/Dockerfile with the wheel in build/release/, and push it.

    Prints name and digest, as the outputs of a step.
    """
    version = load_pins(layout, tag).wheel_version("cuda")
    found = sorted(folder_of(layout).glob(f"vllm-{version}-*_{host_arch()}.whl"))
    if len(found) != 1:
        raise ToolError(f"build/release has {len(found)} wheels of {version}, not one")
    put(found[0], layout.build / "wheels")
    name = repository.lower()
    about = layout.build / "image.json"
    line: list[str | Path] = [
        "docker",
        "build",
        "--file",
        layout.root / "deploy" / "Dockerfile",
    ]
    line += ["--build-arg", f"TAG={tag}", "--build-arg", f"CORE={layout.version}"]
    line += ["--tag", f"{name}:{tag}-{layout.version}", "--push"]
    command([*line, "--metadata-file", about, layout.root])
    digest = json.loads(about.read_text())["containerimage.digest"]
    print(f"name={name}", f"digest={digest}", sep="\n")


# -------------------------------------------------------------------------------- try


def try_it(layout: Layout) -> None:
    """Install the newest CPU wheel from the index into a new environment, and serve.

    pip gets what the wheel needs from the indexes that it is set up with.

    Raises:
        ToolError: the installation fails, or there is no answer.
    """
    wheel = next((w for w in wheels_in(layout) if w.device == "cpu"), None)
    if wheel is None:
        raise ToolError(f"{folder_of(layout)} has no CPU wheel")
    url = (folder_of(layout) / "simple").as_uri()
    target = layout.build / "try"
    shutil.rmtree(target, ignore_errors=True)
    try:
        venv.create(target, with_pip=True)
        python = target / "bin" / "python"
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        install: list[str | Path] = [python, "-m", "pip", "install", "-qq"]
        install += ["--extra-index-url", url, f"vllm=={wheel.version}"]
        env |= {"PATH": f"{python.parent}{os.pathsep}{env['PATH']}"}
        _timed(f"pip install vllm=={wheel.version}", install, env)
        env["PYTHONPATH"] = str(Path(__file__).parents[1] / "scripts")
        _timed("first answer", [python, FIRST_ANSWER, target / "model"], env)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _timed(name: str, line: Iterable[str | Path], env: Mapping[str, str]) -> None:
    start = time.monotonic()
    say(command(line, env).rstrip())
    say(f"{name}: {time.monotonic() - start:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text)

    add("check", "may this tag be released?").add_argument("tag")
    add("plan", "the jobs of the workflow")
    for name in ("wheels", "reproduce"):
        step = add(
            name, "build wheels" if name == "wheels" else "compare a second build"
        )
        step.add_argument("--tags", nargs="*", default=[])
        step.add_argument("--devices", nargs="*", default=[], choices=DEVICES)
        step.add_argument("--arches", nargs="*", default=[])
    add("sbom", "WHEEL.cdx.json of each wheel; needs cyclonedx-python-lib")
    add("sums", SUMS)
    step = add("index", "a package index")
    step.add_argument("folders", nargs="*", type=Path)
    step.add_argument("--out", type=Path)
    step.add_argument("--url", default="")
    step = add("notes", "the page of the release")
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--url", default="")
    add("published", f"{SUMS} of all releases of the forge")
    step = add("image", "build and push the container")
    step.add_argument("tag")
    step.add_argument("repository")
    add("try", "install the CPU wheel from the index, and serve")
    return parser


def main() -> int:
    options = _parser().parse_args()
    layout = Layout.default()
    if options.command == "check":
        check(layout, options.tag)
    elif options.command == "plan":
        plan(layout)
    elif options.command == "wheels":
        what = chosen(layout, options.tags, options.devices)
        build(layout, what, options.arches)
    elif options.command == "reproduce":
        reproduce(layout, options)
    elif options.command == "sbom":
        # Not at the top: the other steps need nothing but Python.
        from sbom import write_sbom

        for wheel in wheels_in(layout):
            write_sbom(layout, wheel)
    elif options.command == "sums":
        sums(layout)
    elif options.command == "index":
        out = options.out or folder_of(layout) / "simple"
        index(layout, options.folders, out, options.url)
    elif options.command == "notes":
        notes(layout, options.out, options.url)
    elif options.command == "published":
        published(layout)
    elif options.command == "image":
        image(layout, options.tag, options.repository)
    elif options.command == "try":
        try_it(layout)
    return 0


if __name__ == "__main__":
    exit_with(main)
