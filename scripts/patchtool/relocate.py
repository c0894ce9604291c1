# SPDX-License-Identifier: Apache-2.0
"""Finds where a change belongs in another release's file: by scope and neighbours.

A change is known by the class or function that it stands in and by the lines that it
stands between. Lines that both releases have are matched within that scope only. Where
one neighbour is gone, the other one tells; where upstream put lines between the two,
the change may belong before or behind them: it is placed if its order does not matter,
as that of an attribute, and else left to a person.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields

from .config import ToolError
from .hunks import Edit, replace
from .source import Scope, Source, read_source

# Says nothing about the place: it occurs everywhere.
WEAK = re.compile(
    r"\W*|(else|try|finally|pass|break|continue|return)\W*|return None|\"\"\".*|@\w+"
)


# Lines on either side that are as they were where a place is exact.
NEAR = 2
# Share of the characters that the head of a block has in common with what it was.
ALIKE = 0.6


@dataclass(frozen=True)
class Placement:
    """Where an edit belongs.

    at: the line in the new file; None where a person must place it. why: what made it
    hard. exact: both neighbours are as they were.
    """

    edit: Edit
    scope: str
    at: int | None
    why: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Token:
    """What is compared: a line, or the begin or end of a scope within the scope."""

    text: str
    line: int
    """Its line; of an end the last one."""


@dataclass
class Aligned:
    """Tokens of a scope in both releases. pairs: numbers of those that match."""

    old: list[Token]
    new: list[Token]
    pairs: dict[int, int] = field(default_factory=dict)


def _tokens(source: Source, scope: Scope) -> list[Token]:
    tokens = [Token("<begin>", scope.first - 1)]
    inner = {s.first: s for s in scope.inner}
    line = scope.first
    while line < scope.end:
        if nested := inner.get(line):
            tokens.append(Token(f"<{nested.name}", line))
            tokens.append(Token(f"{nested.name}>", nested.end - 1))
            line = nested.end
            continue
        if text := source.lines[line].rstrip():
            tokens.append(Token(text, line))
        line += 1
    # Blank lines behind a scope belong to it: what is added at its end follows them.
    while line < len(source.lines) and not source.lines[line].strip():
        line += 1
    return [*tokens, Token("<end>", line)]


def align(old: Source, new: Source, scope: str) -> Aligned:
    """Match what both releases have of a scope; blank lines do not count."""
    found = Aligned(_tokens(old, old.scopes[scope]), _tokens(new, new.scopes[scope]))
    texts = [[token.text for token in side] for side in (found.old, found.new)]
    matcher = difflib.SequenceMatcher(None, texts[0], texts[1], autojunk=False)
    for i, j, size in matcher.get_matching_blocks():
        block = range(size)
        # Lines that occur everywhere match by chance.
        if all(WEAK.fullmatch(texts[0][i + n].strip()) for n in block):
            continue
        found.pairs.update({i + n: j + n for n in block})
    return found


def _scope_of(edit: Edit, old: Source, post: Source, at: int) -> str:
    """The innermost scope of the edit that the old file has. at: its line in `post`."""
    lines = [at + n for n, line in enumerate(edit.added) if line.strip()]
    source, line = (post, lines[0]) if lines else (old, edit.first)
    name = source.scope_at(line).name
    while name not in old.scopes:
        name = name.rpartition(".")[0]
    # What begins a scope belongs to the one around it.
    if edit.removed or not lines or old.scopes[name].first < edit.first:
        return name
    return name.rpartition(".")[0]


def _is_declaration(added: tuple[str, ...]) -> bool:
    """Whether it may stand before or behind its neighbours: attributes and functions of
    a class, `self.name = …`, keyword arguments, entries of a list."""
    text = textwrap.dedent("\n".join(added)).strip()
    if text.endswith(","):
        text = f"f({text})"
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    plain = (ast.AnnAssign, ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Expr)
    return all(
        isinstance(node, plain)
        and (not isinstance(node, ast.Expr) or text.endswith((",)", '"""')))
        or isinstance(node, ast.Assign)
        and all(isinstance(target, ast.Attribute) for target in node.targets)
        for node in body
    )


def _is_field(edit: Edit) -> bool:
    """Whether it is an attribute of a class, with its type."""
    return bool(re.match(r"\s+(#.*)?(\w+: .*)?$", edit.added[0])) and any(
        re.match(r"    \w+: ", line) for line in edit.added
    )


def _imported(line: str) -> str | None:
    """The module of a line that is an import as a whole."""
    match = re.fullmatch(r"\s*from ([\w.]+) import [^(\\]+", line)
    return match[1] if match else None


def _sorted_place(edit: Edit, blocks: tuple[str, ...], new: Source) -> int | None:
    """Where an import belongs among those of its block, in order of the alphabet."""
    modules = [_imported(line) for line in edit.added]
    if edit.removed or not modules or None in modules:
        return None
    module = str(modules[0])
    indent = len(edit.added[0]) - len(edit.added[0].lstrip())
    beside = [
        node
        for node in ast.walk(new.tree)
        if isinstance(node, ast.ImportFrom)
        and node.col_offset == indent
        and new.blocks_at(node.lineno - 1) == blocks
        and str(node.module).split(".")[0] == module.split(".")[0]
    ]
    beside.sort(key=lambda node: node.lineno)
    before = [n for n in beside if str(n.module) < module]
    if not before or len(edit.added) != 1:
        return None
    return before[-1].end_lineno


class Relocator:
    """Places the edits of one file. old, post: the file before and behind them in the
    release that has them. new: the file of the other release.

    Raises:
        ToolError: a file is Python and does not compile.
    """

    def __init__(self, name: str, old: str, post: str, new: str) -> None:
        self.old, self.post, self.new = (read_source(name, t) for t in (old, post, new))
        self._aligned: dict[str, Aligned] = {}

    def place(self, edits: list[Edit]) -> list[Placement]:
        """A place for each edit; what would then stand in other blocks gets none."""
        places = [
            self._place(e, at)
            for e, at in zip(edits, _positions([e.first for e in edits], edits))
        ]
        return self._in_same_blocks(places)

    def _place(self, edit: Edit, at_post: int) -> Placement:
        name = _scope_of(edit, self.old, self.post, at_post)
        if name not in self.new.scopes:
            return Placement(edit, name, None, f"there is no {name}")
        if name not in self._aligned:
            self._aligned[name] = align(self.old, self.new, name)
        aligned = self._aligned[name]
        if edit.removed:
            return self._replace(edit, name, aligned)
        return self._insert(edit, name, aligned, at_post)

    def _replace(self, edit: Edit, scope: str, aligned: Aligned) -> Placement:
        """Lines to remove must be there as they are, in one piece."""
        numbers = [
            n for n, t in enumerate(aligned.old) if edit.first <= t.line < edit.end
        ]
        size = len(edit.removed)
        at = None
        if numbers and all(n in aligned.pairs for n in numbers):
            # Blank lines before the first one are no tokens.
            blanks = aligned.old[numbers[0]].line - edit.first
            at = aligned.new[aligned.pairs[numbers[0]]].line - blanks
        else:
            begin, end = self.new.scopes[scope].first, self.new.scopes[scope].end
            found = [
                line
                for line in range(begin, end)
                if tuple(self.new.lines[line : line + size]) == edit.removed
            ]
            if len(found) == 1:
                at = found[0]
        if at is None or tuple(self.new.lines[at : at + size]) != edit.removed:
            return Placement(
                edit, scope, None, "upstream changed lines that it replaces"
            )
        exact = self._same_lines(edit.first - 1, at - 1) and self._same_lines(
            edit.end, at + size
        )
        why = "" if exact else "upstream changed lines near it"
        return Placement(edit, scope, at, why, exact)

    def _same_lines(self, old: int, new: int) -> bool:
        lines = [
            s.lines[n] if 0 <= n < len(s.lines) else None
            for s, n in ((self.old, old), (self.new, new))
        ]
        return lines[0] == lines[1]

    def _insert(
        self, edit: Edit, scope: str, aligned: Aligned, at_post: int
    ) -> Placement:
        last = max(n for n, t in enumerate(aligned.old) if t.line < edit.first)
        before, after = last, last + 1
        while before not in aligned.pairs and before > 0:
            before -= 1
        while after not in aligned.pairs and after < len(aligned.old) - 1:
            after += 1
        left = aligned.pairs.get(before, 0)
        right = aligned.pairs.get(after, len(aligned.new) - 1)
        lost = (last - before, after - last - 1)
        between = right - left - 1
        if not between and lost == (0, 0):
            return self._beside(edit, scope, aligned, left, right, "", last)
        blocks = self.post.blocks_at(at_post)
        if (at := _sorted_place(edit, blocks, self.new)) is not None:
            return Placement(edit, scope, at, "an import, in its order")
        if not between:
            why = "upstream removed what stood beside it"
            return self._beside(edit, scope, aligned, left, right, why, last)
        if lost[0] == 0 and lost[1]:
            why = "upstream changed what follows"
            return self._beside(edit, scope, aligned, left, left + 1, why, last)
        if lost[1] == 0 and lost[0]:
            why = "upstream changed what stands before"
            return self._beside(edit, scope, aligned, right - 1, right, why, last)
        if lost != (0, 0):
            return Placement(edit, scope, None, "upstream changed both neighbours")
        why = "upstream put lines between its neighbours"
        if not _is_declaration(edit.added):
            return Placement(edit, scope, None, why)
        if _is_field(edit):
            # Behind those of upstream, which callers may name by position.
            while left + 1 < right and aligned.new[left + 1].text[0] != "<":
                left += 1
        elif self._is_apart(edit) < 0:
            return self._beside(edit, scope, aligned, right - 1, right, why, last)
        return self._beside(edit, scope, aligned, left, left + 1, why, last)

    def _is_apart(self, edit: Edit) -> int:
        """1: a blank line is behind it only, -1: before it only."""
        around = [*[""], *edit.added, ""]
        if edit.first > 0:
            around[0] = self.old.lines[edit.first - 1]
        if edit.first < len(self.old.lines):
            around[-1] = self.old.lines[edit.first]
        before = not around[0].strip() or not around[1].strip()
        after = not around[-1].strip() or not around[-2].strip()
        return after - before

    def _beside(
        self,
        edit: Edit,
        scope: str,
        aligned: Aligned,
        left: int,
        right: int,
        why: str,
        last: int,
    ) -> Placement:
        """Between two neighbours in the new file, with the blank lines as they were."""
        begin, end = aligned.new[left].line + 1, aligned.new[right].line
        blanks_before = edit.first - aligned.old[last].line - 1
        blanks_after = aligned.old[last + 1].line - edit.first
        at = min(begin + blanks_before, end)
        if blanks_before and not blanks_after:
            at = end
        same = all(
            aligned.pairs.get(last + n) == left + n
            for n in range(1 - NEAR, NEAR + 1)
            if 0 <= last + n < len(aligned.old)
        )
        if not why and not (same and end - begin == blanks_before + blanks_after):
            why = "upstream changed lines near it"
        return Placement(edit, scope, at, why, exact=not why)

    def result(self, places: list[Placement]) -> str:
        """The new file with the edits that have a place."""
        edits = [
            Edit(p.edit.file, p.at, p.edit.removed, p.edit.added)
            for p in places
            if p.at is not None
        ]
        return replace("".join(f"{line}\n" for line in self.new.lines), edits) or ""

    def _in_same_blocks(self, places: list[Placement]) -> list[Placement]:
        """Take the place from each edit that would stand in other blocks."""
        try:
            now = read_source(self.new.name, self.result(places))
        except ToolError as error:
            why = f"it would not fit there: {error}"
            return [self._without(place, why) for place in places]
        edits = [place.edit for place in places]
        before = _positions([edit.first for edit in edits], edits)
        placed = [place for place in places if place.at is not None]
        placed.sort(key=lambda p: (p.at, p.edit.end))
        after = _positions([p.at or 0 for p in placed], [p.edit for p in placed])
        lines_now = {id(place): line for place, line in zip(placed, after)}
        checked = []
        for place, line_before in zip(places, before):
            code = [n for n, line in enumerate(place.edit.added) if _is_code(line)]
            if place.at is not None and code:
                was = self.post.blocks_at(line_before + code[0])
                found = now.blocks_at(lines_now[id(place)] + code[0])
                if not _alike(was, found):
                    why = f"it stood in {_shown(was)} and would in {_shown(found)}"
                    place = self._without(place, why)
                elif was != found and place.exact:
                    why = f"its block was {_shown(was)} and is {_shown(found)}"
                    place = replace_fields(place, why=why, exact=False)
            checked.append(place)
        return checked

    def _without(self, place: Placement, why: str) -> Placement:
        return replace_fields(place, at=None, why=why, exact=False)


def _positions(firsts: list[int], edits: list[Edit]) -> list[int]:
    """Where edits, in order, stand once all of them are made."""
    shift, found = 0, []
    for first, edit in zip(firsts, edits):
        found.append(first + shift)
        shift += len(edit.added) - len(edit.removed)
    return found


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def _alike(was: tuple[str, ...], found: tuple[str, ...]) -> bool:
    """Whether blocks are the same but for conditions, the innermost nearly so."""
    if len(was) != len(found) or not was:
        return was == found
    ratio = difflib.SequenceMatcher(None, was[-1], found[-1], autojunk=False).ratio()
    return ratio >= ALIKE and all(
        a.split()[0] == b.split()[0] for a, b in zip(was, found)
    )


def _shown(blocks: tuple[str, ...]) -> str:
    """The last two blocks, which are enough to find the place."""
    return " / ".join(f"`{block}`" for block in blocks[-2:]) or "the module"
