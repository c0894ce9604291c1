# SPDX-License-Identifier: Apache-2.0
"""Differences between neighbouring series: each is a question until somebody has said
why; and spoilt series, each of which is noticed."""

import random

import pytest

from patchtool import differs, mutate
from patchtool.__main__ import show_questions
from patchtool.check import check_tag
from patchtool.config import ToolError
from patchtool.hunks import diff
from patchtool.newtag import new_tag
from patchtool.series import refresh
from tests.tooling.project import COUNT, NEW, TAG, Index, Project

NEWEST = "v1.2.0"


def answer(project: Project, tag: str) -> None:
    differs.write(project.layout, tag)
    project.answer(tag)


def rewrite(project: Project, tag: str, before: str, after: str) -> None:
    """Have the first patch make other lines of a file."""
    path = project.layout.patches / tag / "0001-first.patch"
    header = path.read_text().partition("--- ")[0]
    path.write_text(header + diff({"vllm/count.py": before}, {"vllm/count.py": after}))
    refresh(project.layout, tag)


def error(project: Project, tag: str) -> str:
    with pytest.raises(ToolError) as wrong:
        differs.check(project.layout, tag)
    return str(wrong.value)


@pytest.fixture
def three(project: Project, index: Index) -> Project:
    """A series of three releases of the same files."""
    for tag in (NEW, NEWEST):
        index.release({}, version=tag[1:])
        new_tag(project.layout, TAG, tag, resume=False)
        differs.write(project.layout, tag)
    differs.write(project.layout, NEW)
    return project


def test_equal_series_ask_nothing(three: Project) -> None:
    for tag in (NEW, NEWEST):
        assert check_tag(three.layout, tag) == []
    asked = differs.check(three.layout, NEW)
    assert asked == f"0 differences from {TAG} and {NEWEST}, each explained"


@pytest.mark.parametrize(
    "after, shown",
    [
        (
            COUNT.replace("return 3", "return 22"),
            ["< return 22", "> return 22", "0001 vllm/count.py three |"],
        ),
        (COUNT.replace("return 2", "return 2 + 0"), ["< return 22\n> return 2 + 0"]),
    ],
    ids=["in another function", "written otherwise"],
)
def test_an_edit_that_both_neighbours_have_otherwise(
    three: Project, after: str, shown: list[str]
) -> None:
    rewrite(three, NEW, COUNT, after)
    text = error(three, NEW)
    for line in shown:
        assert line in text
    assert f"| {TAG} {NEWEST}\n" in text
    answer(three, NEW)
    assert check_tag(three.layout, NEW) == []
    # An answer is to these lines only.
    rewrite(three, NEW, COUNT, after.replace("def four", "def vier"))
    assert "> def vier" in error(three, NEW)
    rewrite(three, NEW, COUNT, COUNT.replace("return 2", "return 22"))
    assert "no longer so" in error(three, NEW)


def test_lines_that_only_one_neighbour_has_are_asked_for(three: Project) -> None:
    """Those that only this series and one neighbour have are not."""
    more = COUNT.replace("return 2", "return 22").replace("return 4", "return 44")
    rewrite(three, NEWEST, COUNT, more)
    text = error(three, NEW)
    assert "< return 44\n> return 4\n" in text and f"four | {NEWEST}\n" in text
    answer(three, NEW)
    rewrite(three, NEW, COUNT, more)
    assert "no longer so" in error(three, NEW)
    differs.write(three.layout, NEW)
    assert "> return 44" in error(three, NEW)  # against the older one


def test_a_patch_that_only_one_neighbour_has(three: Project) -> None:
    folder = three.layout.patches / NEW
    (folder / "series").write_text("0001-first.patch\n")
    (folder / "0002-second.patch").unlink()
    assert f"0002 | {TAG} {NEWEST}\n< the patch" in error(three, NEW)
    answer(three, NEW)
    assert check_tag(three.layout, NEW) == []
    # A neighbour that lacks it is no word on it.
    assert f"0002 | {NEW}\n> the patch, " in error(three, NEWEST)


def test_one_reason_for_everything(three: Project) -> None:
    after = COUNT.replace("return 2", "return 22")
    for word in ("one", "two", "three", "four"):
        after = after.replace(f"def {word}", f"def {word}teen")
    rewrite(three, NEW, COUNT, after)
    answer(three, NEW)
    assert "one reason for 4 of 4 questions: `because`" in error(three, NEW)


def test_a_patch_whose_lines_have_moved(three: Project) -> None:
    """As those after one that was changed with quilt: the numbers are corrected."""
    path = three.layout.patches / NEW / "0001-first.patch"
    good = path.read_text()
    path.write_text(good.replace("@@ -3,7 +3,7 @@", "@@ -4,7 +4,7 @@"))
    show_questions(three.layout, NEW)
    assert path.read_text() == good


def test_a_series_without_answers(three: Project) -> None:
    (three.layout.patches / NEW / "differs").unlink()
    assert f"make differs TAG={NEW}" in error(three, NEW)


def test_a_line_that_upstream_added_and_the_patch_takes_out(
    project: Project, index: Index
) -> None:
    """As an argument that a release has more in a call that a patch moves."""
    newer = COUNT.replace("    return 2\n", "    return 2\n    # group\n")
    index.release({"vllm/count.py": newer})
    new_tag(project.layout, TAG, NEW, resume=False)
    rewrite(project, NEW, newer, COUNT.replace("return 2", "return 22"))
    text = error(project, NEW)
    assert "- # group\n~ return 22" in text


@pytest.mark.parametrize("kind", mutate.KINDS)
def test_every_spoilt_series_is_noticed(three: Project, kind: str) -> None:
    first = COUNT.replace("return 2\n", "return max(two.size, 22)\n")
    first = first.replace("def three", "# Three.\ndef three")
    for tag in (TAG, NEW, NEWEST):
        rewrite(three, tag, COUNT, first)
    series = differs.read_states(three.layout, NEW, [TAG, NEWEST])
    differs.check(three.layout, NEW, series)
    draw = random.Random(0)
    found = [mutate.spoilt(draw, series, kind) for _ in range(60)]
    done = [each for each in found if each]
    if kind == "another attribute":  # upstream has none here
        assert not done
    for _, states in done:
        with pytest.raises(ToolError, match="have no reason"):
            differs.check(three.layout, NEW, states)


def test_a_spoilt_series_that_nobody_notices(
    three: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differs, "check", lambda *args: "")
    with pytest.raises(ToolError, match="not noticed\n  v1.0.0: "):
        mutate.mutate(three.layout, 1)
