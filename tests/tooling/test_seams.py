# SPDX-License-Identifier: Apache-2.0
"""The table of seams, and names that a release has not."""

from collections.abc import Callable

import pytest

from patchtool import names, seams
from patchtool.config import Layout, ToolError
from patchtool.newtag import new_tag
from patchtool.states import states
from tests.tooling.project import NEW, TAG, Index, Project

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
        (
            "return 22",
            "return 23",
            "`two is more` of 0001 is there 0 times and not 1, in vllm/count.py, two: "
            "`return 23`",
        ),
        (
            'scope = "two"',
            'scope = "one"',
            "of 0001 is in two and not in vllm/count.py, one: `return 22`",
        ),
        ("test = ", "twice = 'return 3'\ntest = ", "is there 1 times and not 2"),
        ("test = ", "twice = 'return 5'\ntest = ", "1 seams once and in their scopes"),
        ("test = ", "before = 'return 3'\ntest = ", "1 seams once and in their scope"),
        ("test = ", "before = 'return 1'\ntest = ", "is not before `return 1`"),
        ("test = ", "before = 'return 9'\ntest = ", "is not before `return 9`"),
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


def test_all_that_is_wrong_is_named_with_how_a_neighbour_has_it(
    project: Project, index: Index
) -> None:
    index.release({})
    new_tag(project.layout, TAG, NEW, resume=False)
    path = project.layout.patches / NEW / "0001-first.patch"
    path.write_text(path.read_text().replace("return 22", "return 2 * 1"))
    table = SEAMS.replace("count.py:four", "count.py:five")
    (project.layout.patches / seams.TABLE).write_text(table)
    with pytest.raises(ToolError) as wrong:
        seams.check(project.layout, NEW)
    text = str(wrong.value)
    assert "is there 0 times" in text
    assert f"{TAG} has in vllm/count.py, two:\n      return 22" in text
    assert "needs vllm/count.py:five" in text


@pytest.mark.parametrize(
    "code, message",
    [
        ("x.nobody = 2", "0001 vllm/count.py: `nobody`"),
        ("x.size = 2", ""),  # upstream has it, in another file
        ("x.VALUE = 2", "`VALUE`"),  # the overlay has it, this release may not
        ("y = x.VALUE", ""),
        ("x: int = 1; y.x = x", ""),
        ("x.nobody = 2; y = x.nobody", "`nobody`"),
        ("self.own = 2; y = self.own", ""),
        ("one(nobody=1)", "`nobody`"),
    ],
)
def test_attributes_and_arguments_that_a_release_has_not(
    project: Project, code: str, message: str
) -> None:
    """Assigning them raises nothing, and nobody reads them."""
    path = project.patches / "0001-first.patch"
    path.write_text(path.read_text().replace("return 22", code))
    found = names.unknown(project.layout, TAG, states(project.layout, TAG))
    assert found == [] if not message else message in found[0]


def test_the_tests_that_the_table_names() -> None:
    assert seams.check_tests(Layout.default()) == []
