# SPDX-License-Identifier: Apache-2.0
"""Patches in the files of another release: git's merge, and what it leaves open."""

from pathlib import Path

import pytest

from patchtool import merge as merging
from patchtool.config import Layout
from patchtool.merge import merge, renames
from tests.tooling.project import COUNT

BASE = (
    "from a import a\nfrom c import c\n\n\n"
    "def f():\n    one()\n    two()\n    three()\n"
)


def merged(old: str, new: str, ours: str) -> tuple[str | None, list[str]]:
    found = merge({"x.py": old}, {"x.py": new}, {"x.py": ours})
    return found.after["x.py"], [c.why for c in found.conflicts]


def changed(text: str, edits: str) -> str:
    """The text with edits made, each `old -> new`; a `/` ends a line."""
    for edit in edits.split("; "):
        old, new = (side.replace("/", "\n") for side in edit.split(" -> "))
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    "mine, upstream, both, why",
    [
        # Far from each other: nothing to decide.
        ("one() -> 1()", "three() -> 3()", "one() -> 1(); three() -> 3()", None),
        (
            "    two() ->     new()/    two()",
            "two() -> 2()",
            "    two() ->     new()/    2()",
            "upstream changed what follows",
        ),
        (
            "one() -> one()/    new()",
            "one() -> 1()",
            "one() -> 1()/    new()",
            "upstream changed what stands before",
        ),
        (
            "from c -> from b import b/from c",
            "from c import c -> from bb import x/from c import d",
            "from c import c -> from b import b/from bb import x/from c import d",
            "upstream changed what follows",
        ),
        (
            "from c import c/ -> from c import c/from d import d/",
            "from c import c/ -> from c import c/from b import b/from e import e/",
            "from c import c/ -> from c import c/from b import b/from d import d/"
            "from e import e/",
            "upstream changed lines round it",
        ),
        # Who comes first, and whether a line is still needed, is for a person.
        (
            "one() -> one()/    new()",
            "one() -> one()/    more()",
            "one() -> one()/    more()",
            "",
        ),
        ("two() -> 2()", "two() -> zwei()", "two() -> zwei()", ""),
    ],
)
def test_changes_of_upstream_and_of_a_patch(
    mine: str, upstream: str, both: str, why: str | None
) -> None:
    found = merged(BASE, changed(BASE, mine), changed(BASE, upstream))
    assert found == (changed(BASE, both), [] if why is None else [why])


def test_markers_are_where_a_person_must_decide() -> None:
    new, ours = BASE.replace("two()", "2()"), BASE.replace("two()", "zwei()")
    found = merge({"x.py": BASE}, {"x.py": new}, {"x.py": ours}, label="0001 of v1")
    text = found.marked["x.py"] or ""
    assert "<<<<<<< upstream\n    zwei()\n" in text and ">>>>>>> 0001 of v1\n" in text


def test_files_that_are_not_there() -> None:
    found = merge({"x.py": BASE}, {"x.py": BASE + "x\n"}, {})
    assert len(found.stopped) == 1 and "x.py" not in found.after
    added = merge({"x.py": None}, {"x.py": "x\n"}, {"x.py": None})
    assert added.after == {"x.py": "x\n"} and not added.conflicts


def test_files_that_upstream_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "upstream_tree", lambda layout, tag: tmp_path / tag)
    for tag, name in (("v1.0.0", "count"), ("v1.1.0", "numbers")):
        path = tmp_path / tag / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(COUNT)
    files = ["vllm/count.py", "vllm/none.py"]
    found = renames(Layout(tmp_path, tmp_path), "v1.0.0", "v1.1.0", files)
    assert found == {"vllm/count.py": "vllm/numbers.py"}
