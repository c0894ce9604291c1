# SPDX-License-Identifier: Apache-2.0
"""`make carry`: one change, made in all series; and series that cannot take it left."""

import subprocess

import pytest

from patchtool import differs
from patchtool.carryall import carry_change
from patchtool.check import check_tag
from patchtool.config import ToolError, read_series
from patchtool.newtag import new_tag
from patchtool.series import refresh
from tests.tooling.project import COUNT, NEW, TAG, Index, Project


def git(project: Project, *args: str) -> None:
    name = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "-C", project.layout.root, *name, *args], check=True)


@pytest.fixture
def both(project: Project, index: Index) -> Project:
    """A series of two releases, in a repository."""
    changed = "# Numbers\n" + COUNT.replace("return 4", "return 4 + 0")
    index.release({"vllm/count.py": changed})
    new_tag(project.layout, TAG, NEW, resume=False)
    git(project, "init", "-q")
    (project.layout.root / ".gitignore").write_text("build\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "series")
    return project


def text(project: Project, tag: str, number: int) -> str:
    (path,) = (project.layout.patches / tag).glob(f"000{number}-*.patch")
    return path.read_text()


def change(project: Project, number: int, old: str, new: str) -> None:
    (path,) = (project.layout.patches / NEW).glob(f"000{number}-*.patch")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def carry(project: Project, name: str) -> None:
    carry_change(project.layout, NEW, name, "HEAD", [])


def test_a_changed_patch(both: Project, capsys: pytest.CaptureFixture[str]) -> None:
    change(both, 1, "return 22", "return 222")
    carry(both, "0001")
    assert f"\n{TAG}: 0001\n" in capsys.readouterr().out
    assert "+    return 222" in text(both, TAG, 1)
    assert "@@ -3,7 +3,7 @@" in text(both, TAG, 1)
    for tag in (TAG, NEW):
        assert "Last-Update: 2026-01-01" not in text(both, tag, 1)
        assert check_tag(both.layout, tag) == []
    # It is not made twice.
    with pytest.raises(ToolError, match=f"left as they are: {TAG}"):
        carry(both, "0001")
    assert text(both, TAG, 1).count("+    return") == 1


def test_a_changed_reason(both: Project) -> None:
    change(both, 2, "Because the tests need it.", "Because of something else.")
    carry(both, "0002")
    assert " Because of something else.\n" in text(both, TAG, 2)
    assert check_tag(both.layout, TAG) == []


def test_a_new_patch_before_another(both: Project) -> None:
    first = text(both, NEW, 1)
    new = first.replace("Description: first", "Description: new").replace(
        first[first.index("@@") :],
        "@@ -8,7 +8,7 @@ def two():\n \n \n def three():\n"
        "-    return 3\n+    return 33\n \n \n def four():\n",
    )
    folder = both.layout.patches / NEW
    (folder / "0003-new.patch").write_text(new)
    names = ["0001-first.patch", "0003-new.patch", "0002-second.patch"]
    (folder / "series").write_text("\n".join([*names, ""]))
    carry(both, "0003")
    assert [p.name for p in read_series(both.layout, TAG)] == names
    assert "@@ -7,7 +7,7 @@" in text(both, TAG, 3)
    assert check_tag(both.layout, TAG) == []


def test_a_prerequisite_that_another_series_has(both: Project) -> None:
    first = text(both, NEW, 1)
    edit = "--- /dev/null\n+++ b/vllm/three.py\n@@ -0,0 +1 @@\n+THREE = 3\n"
    folder = both.layout.patches / NEW
    path = folder / "0000-prerequisite-3.patch"
    path.write_text(first.replace(first[first.index("--- ") :], edit))
    names = ["0000-prerequisite-3.patch", "0001-first.patch", "0002-second.patch"]
    (folder / "series").write_text("\n".join([*names, ""]))
    refresh(both.layout, NEW)
    differs.write(both.layout, NEW)
    git(both, "add", "-A")
    git(both, "commit", "-qm", "prerequisite")
    was = text(both, NEW, 0)
    with pytest.raises(ToolError, match="is as it was in HEAD"):
        carry(both, "0000")
    carry_change(both.layout, NEW, "0000", "HEAD", [TAG])
    assert text(both, NEW, 0) == was
    assert [p.name for p in read_series(both.layout, TAG)] == names
    assert check_tag(both.layout, TAG) == []


def test_a_series_that_cannot_take_it_stays(
    both: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    change(
        both,
        1,
        text(both, NEW, 1)[text(both, NEW, 1).index("@@") :],
        "@@ -12,4 +12,4 @@ def three():\n \n \n def four():\n"
        "-    return 4 + 0\n+    return 44\n",
    )
    before = text(both, TAG, 1)
    with pytest.raises(ToolError, match=f"left as they are: {TAG}"):
        carry(both, "0001")
    out = capsys.readouterr().out
    assert "other lines than" in out and "return 44" in out
    assert text(both, TAG, 1) == before
    assert check_tag(both.layout, TAG) == []


def test_nothing_changed(both: Project) -> None:
    with pytest.raises(ToolError, match="is as it was in HEAD"):
        carry(both, "0001")
    with pytest.raises(ToolError, match="PATCH=0007 may be no patch of the series"):
        carry(both, "0007")
