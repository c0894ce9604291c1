# SPDX-License-Identifier: Apache-2.0
"""`patches/<tag>/differs`: in what a series differs from its neighbours, and why.

Each patch of the nearest older and the nearest newer series is merged into the files of
this release; where that gives other lines than the patch kept here, or where the merge
is not clean, there is a question, to be answered in words in that file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .config import Layout, ToolError, read_series, say, version_key
from .hunks import Edit, diff, parse_diff
from .merge import Conflict, merge, renames
from .states import State, scope_at, states

OPEN = "?"
Key = tuple[str, tuple[str, ...]]
HEAD = """\
# In what this series differs from its neighbours: `<` what theirs would have here, `>`
# what this one has, `=` why. `make differs` writes all but the reasons.
"""


@dataclass(frozen=True)
class Question:
    """One difference. where: patch, file and scope. by: which neighbours differ. only:
    whether these lines are here and not there, which the other neighbour may have."""

    where: str
    body: tuple[str, ...]
    by: tuple[str, ...]
    rows: tuple[int, ...] = ()
    is_only: bool = False
    is_conflict: bool = False

    @property
    def key(self) -> Key:
        return self.where, self.body

    def text(self, why: str) -> str:
        lines = [f"{self.where} | {' '.join(self.by)}", *self.body, f"= {why}"]
        return "".join(f"{line}\n" for line in lines)


def _number(name: str) -> str:
    """`0004`, and for one of several prerequisites its name."""
    return name.removesuffix(".patch") if name.startswith("0000") else name[:4]


def _code(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip()]


def _context(lines: list[str], first: int, end: int) -> tuple[list[str], list[str]]:
    """The nearest lines with something in them before and after some lines."""
    before = [t for n in range(first - 1, -1, -1) if (t := lines[n].strip())][:1]
    after = [t for n in range(end, len(lines)) if (t := lines[n].strip())][:1]
    return before, after


def _question(
    where: str,
    by: str,
    file: str,
    text: str,
    rows: list[int],
    theirs: list[str],
    gone: list[str],
) -> Question:
    """A question on some lines of a file, or on the place before the first of them if
    there is none in `rows` but its negative. theirs: what the neighbour would have.
    gone: what this series takes out and the neighbour does not."""
    lines = text.splitlines()
    first, end = (rows[0], rows[-1] + 1) if rows[0] >= 0 else (~rows[0], ~rows[0])
    rows = [row for row in rows if row >= 0]
    before, after = _context(lines, first, end)
    row = next((n for n in rows if lines[n].strip()), min(first, len(lines) - 1))
    scope = scope_at(file, text, row)
    ours = _code([lines[n] for n in rows])
    body = [f"  {line}" for line in before]
    body += [f"- {line}" for line in gone]
    body += [f"< {line}" for line in theirs] if theirs != ours else []
    body += [f"{'>' if theirs != ours else '~'} {line}" for line in ours]
    body += [f"  {line}" for line in after]
    is_only = not theirs or theirs == ours
    where = f"{where} {scope or 'module'}"
    return Question(where, tuple(body), (by,), tuple(rows), is_only)


def _theirs(conflict: Conflict) -> list[str]:
    """What the patch adds in a conflict."""
    texts = ["".join(f"{x}\n" for x in t) for t in (conflict.base, conflict.theirs)]
    edits = parse_diff(diff({"f": texts[0]}, {"f": texts[1]}))
    return [line for edit in edits for line in _code(edit.added)]


def _gone(conflict: Conflict, before: str, here: str) -> list[str]:
    """Lines of upstream in a conflict that this series takes out, and that a neighbour
    does not take out of its own release."""
    lost = Counter(_code(before.splitlines())) - Counter(_code(here.splitlines()))
    theirs = Counter(_code(conflict.base)) - Counter(_code(conflict.theirs))
    return [
        line for line in _code(conflict.ours) if line in lost and line not in theirs
    ]


def _compare_file(
    where: str,
    by: str,
    file: str,
    texts: tuple[str, str, str],
    found: list[Conflict],
) -> Iterator[Question]:
    """Questions on a file. texts: as it was, what a neighbour's patch would make of it,
    and what it is."""
    before, expected, here = texts
    lines = here.splitlines()
    edits = parse_diff(diff({file: expected}, {file: here}))

    def line_here(line: int) -> int:
        """A line of the file as expected, in the file as it is."""
        before = (e for e in edits if e.end <= line and e.first < line)
        return line + sum(len(e.added) - len(e.removed) for e in before)

    def rows_of(edit: Edit) -> list[int]:
        first = line_here(edit.first)
        return list(range(first, first + len(edit.added))) or [~first]

    used: set[int] = set()
    for conflict in found:
        end = conflict.at + len(conflict.text)
        mine = [e for e in edits if e.first <= end and e.end >= conflict.at]
        used |= {id(edit) for edit in mine}
        rows = {row for edit in mine for row in rows_of(edit)}
        for number, line in enumerate(conflict.text, conflict.at):
            row = line_here(number)
            if line not in conflict.ours and lines[row : row + 1] == [line]:
                rows.add(row)
        there = sorted(row for row in rows if row >= 0) or sorted(rows)
        there = there or [~line_here(conflict.at)]
        gone = _gone(conflict, before, here)
        question = _question(where, by, file, here, there, _theirs(conflict), gone)
        yield replace(question, is_conflict=True)
    for edit in edits:
        if id(edit) not in used and _code([*edit.added, *edit.removed]):
            theirs = _code(edit.removed)
            yield _question(where, by, file, here, rows_of(edit), theirs, [])


def _digest(state: State) -> str:
    edits = parse_diff(diff(state.before, state.after))
    text = "\n".join(f"{edit.file}\n{edit}" for edit in edits)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compare(
    layout: Layout, series: list[State], tag: str, other: str
) -> list[Question]:
    """In what a series differs from another one, patch by patch."""
    theirs = {s.patch.name: s for s in states(layout, other)}
    names = {file for s in theirs.values() for file in s.patch.files}
    renamed = renames(layout, other, tag, names)
    here = {s.patch.name for s in series}
    found = [
        Question(_number(name), ("< the patch",), (other,))
        for name in theirs
        if name not in here
    ]
    for state in series:
        number = _number(state.patch.name)
        if (there := theirs.get(state.patch.name)) is None:
            body = (f"> the patch, {_digest(state)}",)
            found.append(Question(number, body, (other,), is_only=True))
            continue
        merged = merge(there.before, there.after, state.before, renamed)
        files = {*state.patch.files, *(renamed.get(f, f) for f in there.patch.files)}
        for file in sorted(files):
            conflicts = [c for c in merged.conflicts if c.file == file]
            sides = (state.before, merged.after, state.after)
            before, expected, after = (side.get(file) or "" for side in sides)
            if expected != after or conflicts:
                texts = (before, expected, after)
                where = f"{number} {file}"
                found += _compare_file(where, other, file, texts, conflicts)
    return found


def _is_verified(question: Question, others: list[Question]) -> bool:
    """Whether another neighbour has what this series has at the same place, and the one
    that asks has nothing there, or nothing that fits."""
    place = question.where.split()[:2]
    if len(place) > 1 and any(o.where == place[0] for o in others):
        return False
    fits_here = not question.is_only and not (question.is_conflict and question.rows)
    return not fits_here and not any(
        o.where.split()[:2] == place
        and (not question.rows or set(question.rows) & set(o.rows))
        for o in others
    )


def questions(
    layout: Layout, tag: str, others: list[str], series: list[State] | None = None
) -> list[Question]:
    """All questions on a series. Lines that one neighbour lacks and another one has at
    the same place are none; those that only a neighbour has always are."""
    if series is None:
        series = read_states(layout, tag, others)
    by_other = [compare(layout, series, tag, other) for other in others]
    found: dict[Key, Question] = {}
    for number, asked in enumerate(by_other):
        for question in asked:
            rest = [by_other[n] for n in range(len(others)) if n != number]
            if any(_is_verified(question, each) for each in rest):
                continue
            known = found.get(question.key)
            by = (known.by if known else ()) + question.by
            found[question.key] = replace(question, by=tuple(dict.fromkeys(by)))
    return list(found.values())


def read_states(layout: Layout, tag: str, others: list[str]) -> list[State]:
    """The states of a series, with all files that its neighbours touch."""
    more = [f for other in others for p in read_series(layout, other) for f in p.files]
    return states(layout, tag, more=more)


def neighbours(layout: Layout, tag: str) -> list[str]:
    """The nearest older and the nearest newer series."""
    key = version_key(tag)
    older = [t for t in layout.tags() if version_key(t) < key]
    newer = [t for t in layout.tags() if version_key(t) > key]
    return [*older[-1:], *newer[:1]]


def _path(layout: Layout, tag: str) -> Path:
    return layout.patches / tag / "differs"


def _read(layout: Layout, tag: str) -> tuple[list[str], dict[Key, str]]:
    """The neighbours that a series is compared with, and the answers."""
    path = _path(layout, tag)
    others: list[str] = []
    answers: dict[Key, str] = {}
    body: list[str] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith("# Compared with "):
            others = re.findall(r"v[\w.]+\w", line)
        elif line.startswith("= "):
            where = body[0].rpartition(" | ")[0]
            answers[where, tuple(body[1:])] = line.removeprefix("= ").strip()
            body = []
        elif line and not line.startswith("#"):
            body.append(line)
    return others, answers


def write(layout: Layout, tag: str) -> list[Question]:
    """Write the questions on a series; answers stay. Returns those that are open."""
    others = neighbours(layout, tag)
    _, answers = _read(layout, tag)
    asked = questions(layout, tag, others)
    text = f"{HEAD}# Compared with {' and '.join(others) or 'none'}.\n"
    for question in asked:
        text += "\n" + question.text(answers.get(question.key, OPEN))
    _path(layout, tag).write_text(text)
    for where, body in answers.keys() - {question.key for question in asked}:
        say("\n".join([f"{tag}: no question any more: {where}", *body]))
    return [q for q in asked if answers.get(q.key, OPEN) == OPEN]


def check(layout: Layout, tag: str, series: list[State] | None = None) -> str:
    """Compare a series with its neighbours and the answers. series: instead of the one
    that is kept.

    Raises:
        ToolError: a question is open, there is an answer to none, or one answer to so
            many that it was given without reading them.
    """
    others, answers = _read(layout, tag)
    kept = [other for other in others if other in layout.tags()]
    if not _path(layout, tag).is_file() and neighbours(layout, tag):
        raise ToolError(f"patches/{tag}/differs is missing; `make differs TAG={tag}`")
    asked = {q.key: q for q in questions(layout, tag, kept, series)}
    wrong = [q.text(OPEN) for k, q in asked.items() if answers.get(k, OPEN) == OPEN]
    if kept == others:
        wrong += [
            "\n".join([f"{where} | no longer so", *body, ""])
            for where, body in answers.keys() - asked.keys()
        ]
    if wrong:
        raise ToolError(
            f"{tag}: {len(wrong)} differences from {' and '.join(kept)} have no reason "
            f"(`<` theirs, `>` here):\n\n{chr(10).join(wrong)}\n"
            f"Change the patch, or run `make differs TAG={tag}` and write the reason "
            f"after each `=` in patches/{tag}/differs"
        )
    for reason, number in Counter(answers[key] for key in asked).items():
        if number > max(3, len(asked) // 3):
            raise ToolError(
                f"patches/{tag}/differs has one reason for {number} of {len(asked)} "
                f"questions: `{reason}`. Write the reason of each"
            )
    return f"{len(asked)} differences from {' and '.join(kept)}, each explained"
