# SPDX-License-Identifier: Apache-2.0
"""Edits that stand where somebody has seen them, and seams that are all there."""

from collections.abc import Callable

import pytest

from patchtool import places, seams
from patchtool.carrying import states
from patchtool.check import check_tag
from patchtool.config import Layout, ToolError
from patchtool.hunks import diff
from patchtool.mutate import mutants, mutate
from patchtool.newtag import new_tag
from patchtool.pairs import compare_all
from patchtool.series import refresh
from tests.tooling.project import COUNT, TAG, Index, Project
from tests.tooling.test_new_tag import NEW, publish

SEAMS = """\
[[seam]]
name = "two is more"
patch = "0001"
file = "vllm/count.py"
scope = "two"
code = "return 22"
test = "tests/test_count.py::test_two"
needs = ["vllm/v1/pool.py:Pool.size", "vllm/count.py:four"]

[[upstream]]
file = "vllm/v1/pool.py"
by = "the overlay"
names = ["Pool", "Pool.size"]
"""


@pytest.fixture
def table(project: Project) -> Callable[[str, str], str]:
    """Write the table with one text replaced; what the check then says."""

    def check(old: str, new: str) -> str:
        assert old in SEAMS
        path = project.layout.patches / seams.TABLE
        path.write_text(SEAMS.replace(old, new))
        try:
            return seams.check(project.layout, TAG)
        except ToolError as error:
            return str(error)

    return check


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("", "", "1 seams once and in their scopes, 3 names of upstream"),
        ("return 22", "return 23", "`two is more` of 0001 is there 0 times"),
        ('scope = "two"', 'scope = "one"', "of 0001 is in two and not in one"),
        ("count.py:four", "count.py:five", "needs vllm/count.py:five"),
        ('"Pool.size"]', '"Pool.width"]', "needs vllm/v1/pool.py:Pool.width"),
        ('by = "the', 'from = "the', "seams.toml: "),
        ("test = ", 'since = "v2.0.0"\ntest = ', "0 seams once and in their scopes, 2"),
        ("test = ", 'until = "v1.0.0"\ntest = ', "1 seams once and in their scopes"),
        (
            "test = ",
            'until = "v0.9.0"\nwhy = "one is enough"\ntest = ',
            "is for releases up to v0.9.0: one is enough",
        ),
    ],
)
def test_the_table(
    table: Callable[[str, str], str], old: str, new: str, message: str
) -> None:
    assert message in table(old, new)


def test_tests_that_are_not_there(project: Project) -> None:
    (project.layout.patches / seams.TABLE).write_text(SEAMS)
    assert seams.check_tests(project.layout) == ["tests/test_count.py::test_two"]


def test_what_a_release_defines() -> None:
    text = (
        "import os as o\nA = 1\nclass C:\n    b: int\n    c = 2\n"
        "    def f(self, d, *, e):\n        self.g = o\n"
        "if A:\n    def h(): ...\n"
    )
    wanted = {"o", "A", "C", "C.b", "C.c", "C.g", "h"}
    wanted |= {"C.f", "C.f(self)", "C.f(d)", "C.f(e)"}
    assert seams.defined("x.py", text) == wanted


def test_an_edit_that_stands_elsewhere(project: Project) -> None:
    """It applies, compiles and imports."""
    path = project.patches / "0001-first.patch"
    header = path.read_text().partition("--- ")[0]
    other = COUNT.replace("return 3", "return 22")
    path.write_text(header + diff({"vllm/count.py": COUNT}, {"vllm/count.py": other}))
    refresh(project.layout, TAG)
    (error,) = check_tag(project.layout, TAG)
    assert "- 0001 | vllm/count.py | two | def two | def two(): | def three():" in error
    assert "+ 0001 | vllm/count.py | three | def three" in error
    places.accept(project.layout, TAG)
    assert check_tag(project.layout, TAG) == []


def test_a_tag_without_places(project: Project) -> None:
    (project.patches / "places").unlink()
    with pytest.raises(ToolError, match=f"make places TAG={TAG}"):
        places.check(project.layout, TAG)


def test_every_spoilt_series_is_noticed(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.layout.patches / seams.TABLE).write_text(SEAMS)
    before = (project.patches / "0001-first.patch").read_text()
    names = [name for name, _ in mutants(states(project.layout, TAG))]
    assert "0001 vllm/count.py: return 22 removed" in names
    found = mutate(project.layout, TAG)
    assert found.total() == len(names) and not found["nothing"]
    assert found["seams"] and found["places"]
    assert f"{TAG}: {len(names)} spoilt series" in capsys.readouterr().out
    assert (project.patches / "0001-first.patch").read_text() == before


def test_a_spoilt_series_that_nobody_notices(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.layout.patches / seams.TABLE).write_text("")
    monkeypatch.setattr(places, "check", lambda layout, tag: "")
    with pytest.raises(ToolError, match="nothing noticed\n  0001 vllm/count.py"):
        mutate(project.layout, TAG)


def test_the_tests_that_the_table_names() -> None:
    assert seams.check_tests(Layout.default()) == []


def test_series_that_are_kept_against_each_other(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, {"vllm/count.py": "# Numbers\n" + COUNT})
    new_tag(project.layout, TAG, NEW, resume=False)
    assert [pair.counts["as kept"] for pair in compare_all(project.layout)] == [4, 4]
    # The kept one is made wrong: that the tool would place it elsewhere must show.
    (path,) = (project.layout.patches / NEW).glob("0001-*.patch")
    old = "# Numbers\n" + COUNT
    new = old.replace("return 3", "return 22")
    header = path.read_text().partition("--- ")[0]
    path.write_text(header + diff({"vllm/count.py": old}, {"vllm/count.py": new}))
    with pytest.raises(ToolError, match="v1.1.0: vllm/count.py, two: return 22 at 7"):
        compare_all(project.layout)
    assert "1 silent" in capsys.readouterr().out
