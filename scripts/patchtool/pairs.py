# SPDX-License-Identifier: Apache-2.0
"""`make pairs`: carries every series to its neighbours, and compares with those kept.

A patch of one series is placed in the files of the other as that has them before the
same patch. An edit that both have must come to the same lines; one that comes elsewhere
without being marked for review would be silently wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .carrying import State, carry, states
from .config import Layout, ToolError, say
from .hunks import Edit, parse
from .relocate import Placement


@dataclass
class Pair:
    """What became of the edits of one series in another one."""

    source: str
    target: str
    counts: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ("edits", "stop", "as kept", "elsewhere, marked", "other lines there")
        counts = ", ".join(f"{self.counts[name]} {name}" for name in names)
        return f"{self.source} to {self.target}: {counts}, {len(self.silent)} silent"


def _judge(pair: Pair, place: Placement, kept: list[Edit], state: State) -> None:
    """Compare a place with the one that the same edit has in the kept series."""
    edit = place.edit
    same = [e for e in kept if (e.file, e.added) == (edit.file, edit.added)]
    pair.counts["edits"] += 1
    if place.at is None:
        pair.counts["stop"] += 1
    elif not same:
        pair.counts["other lines there"] += 1
    elif any(_is_there(place.at, e, state.before.get(e.file) or "") for e in same):
        pair.counts["as kept"] += 1
    elif place.exact:
        what = next((line for line in edit.added if line.strip()), "")
        where = f"{place.at + 1} and not {same[0].first + 1}"
        pair.silent.append(f"{edit.file}, {place.scope}: {what.strip()} at {where}")
    else:
        pair.counts["elsewhere, marked"] += 1


def _is_there(at: int, kept: Edit, text: str) -> bool:
    """Whether two places are the same but for blank lines."""
    lines = text.splitlines()
    low, high = sorted((at, kept.first))
    return not any(line.strip() for line in lines[low:high])


def compare(layout: Layout, source: str, target: str) -> Pair:
    """Carry one series to the release of another one that is kept."""
    pair = Pair(source, target)
    kept = {s.patch.name: s for s in states(layout, target)}
    for state in states(layout, source):
        if (there := kept.get(state.patch.name)) is None:
            continue
        edits = parse(state.patch)
        carried = carry(edits, state.before, state.after, there.before)
        for place in carried.placements:
            _judge(pair, place, parse(there.patch), there)
    return pair


def compare_all(layout: Layout) -> list[Pair]:
    """Every series with its neighbours, both ways.

    Raises:
        ToolError: an edit stands elsewhere than in the kept series, and is not marked.
    """
    tags = layout.tags()
    found = []
    for older, newer in zip(tags, tags[1:]):
        for source, target in ((older, newer), (newer, older)):
            found.append(compare(layout, source, target))
            say(str(found[-1]))
    if silent := [f"{p.target}: {text}" for p in found for text in p.silent]:
        raise ToolError("silently elsewhere than kept:\n  " + "\n  ".join(silent))
    return found
