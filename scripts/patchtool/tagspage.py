# SPDX-License-Identifier: Apache-2.0
"""`make tags-page`: docs/tags.md and the table in README.md, what each series adds and
what was tested."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from .check import num_counted_lines, num_lines, parse_header
from .config import Layout, Patch, ToolError, load_pins, read_series, tomllib

PAGE, README = "docs/tags.md", "README.md"
BEGIN, END = "<!-- releases: made by `make tags-page` -->\n", "<!-- releases end -->\n"
RESULTS = "ci/tested.toml"
HEAD = """\
# Releases

Made by `make tags-page` from the headers of the patches and from `ci/tested.toml`.
The overlay is the same on all of them, and looks at no version: its module `releases`
asks what a release has. Prerequisites are what later releases of upstream bring
themselves; they and the patch of the settings do not count as lines touched.
"""
FROZEN = ("v0.9.2", "v0.11.0")
"""Releases whose series get no new seams."""


PATCHES = """\
## Patches

Upstream lines that each patch touches. –: not in this series. Releases without a
prerequisite have it upstream or do not need it.
"""


@dataclass(frozen=True)
class Results:
    """What was run on a release, and what its users must know."""

    date: str
    summary: str = "nothing"
    """In a few words, for README.md."""
    unit: str = "not run"
    sim: str = "not run"
    e2e: str = "not run"
    gpu: str = "not run"
    turn: str = "not yet"
    """When CI last ran test_answers and test_faults on it; it takes the older releases
    in turn."""
    notes: tuple[str, ...] = field(default=())


def load_results(layout: Layout) -> dict[str, Results]:
    """`ci/tested.toml`, by tag.

    Raises:
        ToolError: a key is unknown, or a tag is not kept here.
    """
    path = layout.root / RESULTS
    data = tomllib.loads(path.read_text())
    if unknown := sorted(data.keys() - set(layout.tags())):
        raise ToolError(f"{RESULTS} names {unknown}, which are not kept here")
    try:
        return {
            tag: Results(**{**found, "notes": tuple(found.get("notes", ()))})
            for tag, found in data.items()
        }
    except TypeError as error:
        raise ToolError(f"{RESULTS}: {error}") from error


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _title(patch: Patch) -> str:
    return parse_header(patch)["Description"].splitlines()[0]


def _frozen(tags: list[str]) -> str:
    """A paragraph on the releases that are kept as they are; empty if none is."""
    if not (found := [tag for tag in reversed(tags) if tag in FROZEN]):
        return ""
    text = (
        f"Frozen: {' and '.join(found)}. The host tier, its metrics and its events "
        "stay there as they are. A new feature that needs another change of upstream "
        "is refused there at start, with a message that names the setting."
    )
    return f"\n{textwrap.fill(text, 88)}\n"


def page(layout: Layout) -> str:
    """The text of docs/tags.md."""
    results = load_results(layout)
    tags = layout.tags()[::-1]
    series = {tag: read_series(layout, tag) for tag in tags}

    tested = []
    for tag in tags:
        cpu = load_pins(layout, tag).cpu
        engine = "none" if cpu is None else f"torch {cpu.torch}"
        if cpu is not None and cpu.extensions_only:
            engine += ", binaries of another release"
        found = results.get(tag, Results("–"))
        lines = str(num_counted_lines(layout, tag))
        runs = [found.unit, found.sim, found.e2e, found.turn, found.gpu, found.date]
        tested.append([tag, lines, engine, *runs])
    head = ["release", "lines touched", "CPU engine"]
    head += ["unit", "simulator", "end to end, CPU", "last turn in CI", "GPU", "when"]
    text = f"{HEAD}{_frozen(tags)}\n## What was tested\n\n{_table(head, tested)}"

    titles: dict[str, str] = {}
    for tag in tags:
        for patch in series[tag]:
            titles.setdefault(patch.name, _title(patch))
    rows = []
    for name in sorted(titles):
        cells = []
        for tag in tags:
            sizes = {p.name: num_lines(p) for p in series[tag]}
            cells.append(str(sizes[name]) if name in sizes else "–")
        title = titles[name].removeprefix("Prerequisite: ")
        rows.append([f"`{name.removesuffix('.patch')}`: {title}", *cells])
    text += f"\n{PATCHES}\n{_table(['patch', *tags], rows)}"

    notes = [(tag, results[tag].notes) for tag in tags if tag in results]
    text += "\n## Differences between releases\n\n"
    for tag, lines_of in notes:
        text += "".join(f"- **{tag}**: {line}\n" for line in lines_of)
    return text


def readme(layout: Layout) -> str:
    """The text of README.md, with the table of this state."""
    results = load_results(layout)
    rows = []
    for tag in layout.tags()[::-1]:
        found = results.get(tag, Results("–"))
        rows.append([tag, str(num_counted_lines(layout, tag)), found.summary])
    table = _table(["release", "lines", "tested on"], rows)
    text = (layout.root / README).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ToolError(f"{README} lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write_page(layout: Layout) -> None:
    (layout.root / PAGE).write_text(page(layout))
    (layout.root / README).write_text(readme(layout))
