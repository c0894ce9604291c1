# SPDX-License-Identifier: Apache-2.0
"""`make check-patches`: what must hold for every tag's series and for the overlay."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import differs, importcheck, seams
from .config import (
    Layout,
    Patch,
    ToolError,
    overlay_files,
    read_series,
    say,
)
from .env import has_env, sync
from .hunks import parse
from .names import lint
from .series import walk
from .states import states
from .tree import locked, touched_files, upstream_tree

FIELDS = ("Description", "Author", "Forwarded", "Last-Update", "Retires-when")
# The seams must stay small; the flag and its settings do not count, nor does what a
# later release of upstream brings itself.
LINE_BUDGET = 200
CONFIG, PREREQUISITE = "-config-", "-prerequisite-"
# Most of what the first import waits for; all prefixes share it.
PRELOAD = ["torch._dynamo", "torch._inductor", "transformers"]
VERSION_CHECK = re.compile(
    r"__version__|__version_tuple__|vllm\.version|metadata\.version|packaging"
)


def series_and_folder(layout: Layout, tag: str) -> str:
    names = [p.name for p in read_series(layout, tag)]
    folder = {p.name for p in (layout.patches / tag).iterdir()}
    if extra := sorted(folder - {*names, "series", "upstream.toml", "differs"}):
        raise ToolError(f"patches/{tag}/ has {extra}, which series does not name")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ToolError(f"patches/{tag}/series names {twice} more than once")
    if empty := [p.name for p in read_series(layout, tag) if not parse(p)]:
        raise ToolError(f"patches/{tag}: {empty} change nothing; remove them")
    return f"series and folder agree on {len(names)} patches"


def parse_header(patch: Patch) -> dict[str, str]:
    """DEP-3 fields; a continued line starts with a space."""
    fields: dict[str, str] = {}
    last = ""
    for line in patch.header.splitlines():
        if match := re.match(r"([A-Z][\w-]*):\s*(.*)$", line):
            last = match[1]
            fields[last] = match[2]
        elif last and line.startswith(" "):
            fields[last] += "\n" + line.strip()
    return fields


def headers(layout: Layout, tag: str) -> str:
    for patch in read_series(layout, tag):
        fields = parse_header(patch)
        if missing := [f for f in FIELDS if not fields.get(f, "").strip()]:
            raise ToolError(f"{tag}/{patch.name}: the header lacks {missing}")
        if "\n" not in fields["Description"]:
            raise ToolError(
                f"{tag}/{patch.name}: Description has no second line with the reason"
            )
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", fields["Last-Update"]):
            raise ToolError(
                f"{tag}/{patch.name}: Last-Update {fields['Last-Update']!r} is not "
                "YYYY-MM-DD"
            )
    return "headers are complete"


def num_lines(patch: Patch) -> int:
    """Lines that a patch adds and removes."""
    return sum(
        line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- "))
        for line in patch.text[len(patch.header) :].splitlines()
    )


def num_counted_lines(layout: Layout, tag: str) -> int:
    return sum(
        num_lines(patch)
        for patch in read_series(layout, tag)
        if CONFIG not in patch.name and PREREQUISITE not in patch.name
    )


def line_count(layout: Layout, tag: str) -> str:
    count = num_counted_lines(layout, tag)
    if count > LINE_BUDGET:
        raise ToolError(
            f"{tag}: the series adds and removes {count} lines, more than "
            f"{LINE_BUDGET}; move logic into the overlay"
        )
    return f"{count} upstream lines touched (at most {LINE_BUDGET})"


def overlay(layout: Layout, tag: str) -> str:
    files = overlay_files(layout)
    upstream, touched = upstream_tree(layout, tag), touched_files(layout, tag)
    if clash := sorted(f for f in files if (upstream / f).exists() or f in touched):
        raise ToolError(f"{tag}: upstream or the series has overlay files: {clash}")
    for name, path in files.items():
        if path.suffix == ".py" and (match := VERSION_CHECK.search(path.read_text())):
            raise ToolError(
                f"overlay file {name} looks at a version ({match[0]!r}); the overlay "
                "is the same on every tag, so differences belong into patches"
            )
    return f"{len(files)} overlay files, none upstream, none looks at a version"


def _modules(files: list[str]) -> list[str]:
    return [
        importcheck.module_name(f)
        for f in files
        if f.startswith("vllm/") and f.endswith(".py")
    ]


def _snapshot(layout: Layout, stage: Path, target: Path) -> None:
    """The touched files as they are after a step, and the overlay."""
    shutil.copytree(stage, target, ignore=shutil.ignore_patterns(".pc"))
    for name, source in overlay_files(layout).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)


def _compile(folder: Path, files: list[str], prefix: str) -> None:
    for name in files:
        path = folder / name
        if path.suffix == ".py" and path.is_file():
            try:
                compile(path.read_bytes(), name, "exec", dont_inherit=True)
            except SyntaxError as error:
                message = f"{prefix}: {name} does not compile: {error}"
                raise ToolError(message) from error


def _imports(layout: Layout, tag: str, work: Path, prefixes: list[Patch]) -> str:
    if not has_env(layout, tag):
        return f"imports NOT checked: `make env TAG={tag}` makes that possible"
    sync(layout, tag)
    done: list[str] = []
    # For each prefix the folder, what to import, and what later patches change.
    steps: list[tuple[str, list[str], list[str]]] = []
    for number, patch in enumerate(prefixes, 1):
        done += [f for f in patch.files if f not in done]
        folder = work / "prefixes" / str(number)
        present = [f for f in done if (folder / f).is_file()]
        later = [f for patch in prefixes[number:] for f in patch.files]
        steps.append((str(folder), _modules(present), _modules(later)))
    if steps:
        steps[-1][1].extend(_modules(list(overlay_files(layout))))
    job = {
        "files": [*touched_files(layout, tag), *overlay_files(layout)],
        "prefixes": steps,
        "preload": PRELOAD,
        "results": str(work / "results.json"),
    }
    (work / "job.json").write_text(json.dumps(job))
    python = str(layout.env(tag) / "bin" / "python")
    command = [python, importcheck.__file__, str(work / "job.json")]
    env = dict(os.environ, VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        raise ToolError(f"{tag}: the import check died:\n{result.stderr[-2000:]}")
    errors = json.loads((work / "results.json").read_text())
    for patch, error in zip(prefixes, errors):
        if error:
            raise ToolError(f"{tag}, prefix up to {patch.name}: {error}")
    return f"every prefix imports the {len(_modules(done))} modules it touches"


def _names(layout: Layout, tag: str, work: Path, series: list[Patch]) -> str:
    # It reads files only, so that any environment's will do.
    paths = [layout.env(t) / "bin" / "ruff" for t in (tag, *layout.tags())]
    ruff = next((path for path in paths if path.is_file()), shutil.which("ruff"))
    if ruff is None:
        return f"names NOT checked: `make env TAG={tag}` makes that possible"
    folders = [work / "prefixes" / str(n) for n, _ in enumerate(series, 1)]
    upstream = upstream_tree(layout, tag)
    if found := lint(Path(ruff), upstream, folders, states(layout, tag)):
        raise ToolError(f"{tag}, {found}")
    return "every name that is used is defined, and imported once"


def prefixes(layout: Layout, tag: str) -> Iterator[str]:
    """Zero fuzz, nothing to refresh, and every prefix compiles and imports."""
    work = layout.build / "check" / tag
    with locked(work):
        shutil.rmtree(work / "prefixes", ignore_errors=True)
        series = read_series(layout, tag)
        stale = []
        for number, step in enumerate(walk(layout, tag, work), 1):
            if step.refreshed != step.patch.text:
                stale.append(step.patch.name)
            folder = work / "prefixes" / str(number)
            _snapshot(layout, step.stage, folder)
            _compile(folder, step.patch.files, f"{tag}, prefix up to {step.patch.name}")
        yield f"{len(series)} patches apply with zero fuzz, every prefix compiles"
        if stale:
            raise ToolError(
                f"{tag}: `quilt refresh` changes {stale}; run `make refresh TAG={tag}`"
            )
        yield "quilt refresh gives no diff"
        yield differs.check(layout, tag)
        yield seams.check(layout, tag)
        yield _names(layout, tag, work, series)
        yield _imports(layout, tag, work, series)


CHECKS: list[Callable[[Layout, str], str]] = [
    series_and_folder,
    headers,
    line_count,
    overlay,
]


def check_tag(layout: Layout, tag: str) -> list[str]:
    """Run all checks of a tag, a line for each; returns the errors."""
    errors = []
    start = time.monotonic()

    def results() -> Iterator[Callable[[], str]]:
        yield from ((lambda c=check: c(layout, tag)) for check in CHECKS)  # type: ignore[misc]
        steps = prefixes(layout, tag)
        yield from (lambda: next(steps) for _ in range(6))

    for run in results():
        try:
            say(f"ok    {tag}: {run()}")
        except ToolError as error:
            errors.append(str(error))
            say(f"FAIL  {tag}: {error}")
        except StopIteration:
            break  # a step before it failed
    say(f"      {tag}: {time.monotonic() - start:.1f} s")
    return errors


def check_patches(layout: Layout, tags: list[str]) -> None:
    """Check every tag, or those named, side by side.

    Raises:
        ToolError: something does not hold; all failures have been printed.
    """
    tags = tags or layout.tags()
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = pool.map(lambda tag: check_tag(layout, tag), tags)
        errors = [error for result in results for error in result]
    if errors:
        raise ToolError(f"check-patches: {len(errors)} failed, see FAIL above")
    say(f"check-patches: all hold for {', '.join(tags)}")
