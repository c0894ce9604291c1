# SPDX-License-Identifier: Apache-2.0
"""`make apply-patches`: right, repeatable, and never at the cost of an edit."""

import json
import os
import shutil

import pytest

from patchtool import tree
from patchtool.config import ToolError
from patchtool.quilt import applied, quilt
from patchtool.tree import BUILD_INFO, apply_patches
from tests.tooling.project import TAG, Project, upstream


def apply(project: Project, force: bool = False) -> None:
    apply_patches(project.layout, TAG, force)


def contents(project: Project) -> dict[str, bytes]:
    """All files of the tree but the tool's stamp."""
    return {
        str(path.relative_to(project.tree)): path.read_bytes()
        for path in project.tree.rglob("*")
        if path.is_file() and not path.name.startswith(tree.STAMP)
    }


def test_tree_is_sdist_plus_series_plus_overlay(project: Project) -> None:
    apply(project)
    assert "return 22" in (project.tree / "vllm/count.py").read_text()
    assert (project.tree / "vllm/v1/seam.py").read_text() == "SIZE = 7\n"
    assert (project.tree / "vllm/v1/kv_tier/value.py").read_text() == "VALUE = 1\n"
    untouched = upstream("1.0.0").keys() - {"vllm/count.py", "vllm/v1/pool.py"}
    for name in untouched:
        assert (project.tree / name).read_text() == upstream("1.0.0")[name]
    assert applied(project.tree) == ["0001-first.patch", "0002-second.patch"]
    assert not list(project.tree.rglob("*.rej")) + list(project.tree.rglob("*.orig"))
    info = json.loads((project.tree / BUILD_INFO).read_text())
    assert (info["tag"], info["version"]) == (TAG, "1.0.0+core.1")
    assert [p["name"] for p in info["patches"]] == applied(project.tree)


def test_second_run_writes_nothing(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(project)
    before = {p: p.stat().st_mtime_ns for p in project.tree.rglob("*")}
    capsys.readouterr()
    apply(project)
    assert {p: p.stat().st_mtime_ns for p in project.tree.rglob("*")} == before
    assert capsys.readouterr().out == ""


def test_changes_of_series_and_overlay_arrive(project: Project) -> None:
    apply(project)
    path = project.patches / "0001-first.patch"
    path.write_text(path.read_text().replace("return 22", "return 222"))
    project.write_overlay("VALUE = 2\n")
    project.write_overlay("", "vllm/v1/kv_tier/more.py")
    apply(project)
    assert "return 222" in (project.tree / "vllm/count.py").read_text()
    assert (project.tree / "vllm/v1/kv_tier/value.py").read_text() == "VALUE = 2\n"
    assert (project.tree / "vllm/v1/kv_tier/more.py").exists()


def test_what_is_dropped_goes_away(project: Project) -> None:
    apply(project)
    project.write_overlay("", "vllm/v1/kv_tier/more.py")
    apply(project)
    (project.patches / "series").write_text("0001-first.patch\n")
    (project.layout.overlay / "vllm/v1/kv_tier/more.py").unlink()
    apply(project)
    pool = (project.tree / "vllm/v1/pool.py").read_text()
    assert pool == upstream("1.0.0")["vllm/v1/pool.py"]
    assert not (project.tree / "vllm/v1/seam.py").exists()
    assert not (project.tree / "vllm/v1/kv_tier/more.py").exists()
    assert applied(project.tree) == ["0001-first.patch"]


@pytest.mark.parametrize("name", ["vllm/count.py", "vllm/__init__.py", "mine.py"])
def test_an_edit_is_refused_and_kept(project: Project, name: str) -> None:
    apply(project)
    expected = contents(project)
    (project.tree / name).write_text("my work\n")
    with pytest.raises(ToolError, match=f"would lose(.|\n)*{name}(.|\n)*FORCE=1"):
        apply(project)
    assert (project.tree / name).read_text() == "my work\n"
    apply(project, force=True)
    assert contents(project) == expected


def test_an_edit_is_kept_when_the_series_changes(project: Project) -> None:
    apply(project)
    (project.tree / "vllm/count.py").write_text("my work\n")
    project.write_overlay("VALUE = 2\n")
    with pytest.raises(ToolError, match="vllm/count.py"):
        apply(project)
    assert (project.tree / "vllm/count.py").read_text() == "my work\n"


def test_a_deleted_file_counts_as_an_edit(project: Project) -> None:
    apply(project)
    (project.tree / "vllm/__init__.py").unlink()
    with pytest.raises(ToolError, match="vllm/__init__.py"):
        apply(project)
    apply(project, force=True)
    assert (project.tree / "vllm/__init__.py").exists()


def test_an_edit_that_was_refreshed_into_its_patch_is_no_edit(project: Project) -> None:
    apply(project)
    path = project.tree / "vllm/v1/pool.py"
    path.write_text(path.read_text().replace("size = SIZE", "size = SIZE + 1"))
    assert quilt(project.layout, TAG, project.tree, "refresh").returncode == 0
    apply(project)
    assert "SIZE + 1" in (project.patches / "0002-second.patch").read_text()
    assert "SIZE + 1" in path.read_text()


def test_popped_patches_are_refused_with_the_command_to_run(project: Project) -> None:
    apply(project)
    quilt(project.layout, TAG, project.tree, "pop", "-a")
    with pytest.raises(ToolError, match="0 of 2 patches(.|\n)*push -a"):
        apply(project)
    quilt(project.layout, TAG, project.tree, "push", "-a")
    apply(project)


def test_interrupted_unpacking_is_repaired(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = tree.unpack

    def half(*args: object, **kwargs: bool) -> None:
        unpack(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(tree, "unpack", half)
    with pytest.raises(KeyboardInterrupt):
        apply(project)
    assert not project.tree.exists()
    monkeypatch.undo()
    shutil.rmtree(project.tree.with_name("src.partial") / "vllm")
    apply(project)
    assert (project.tree / "vllm/__init__.py").exists()


@pytest.mark.parametrize("moves", range(6))
def test_interrupted_installation_is_repaired(
    project: Project, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    apply(project)
    path = project.patches / "0001-first.patch"
    path.write_text(path.read_text().replace("return 22", "return 222"))
    project.write_overlay("VALUE = 2\n")
    replace, left = os.replace, [moves]

    def interrupted(source: str, target: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply(project)
    monkeypatch.setattr(os, "replace", replace)
    apply(project)
    repaired = contents(project)
    shutil.rmtree(project.layout.build)
    apply(project)
    assert repaired == contents(project)


def test_a_tree_of_somebody_else_is_refused(project: Project) -> None:
    project.tree.mkdir(parents=True)
    (project.tree / "work").write_text("mine")
    with pytest.raises(ToolError, match="FORCE=1"):
        apply(project)
    assert (project.tree / "work").exists()
    apply(project, force=True)
    assert not (project.tree / "work").exists()


@pytest.mark.parametrize("name", ["vllm/count.py", "vllm/v1/seam.py"])
def test_overlay_must_not_replace_a_file(project: Project, name: str) -> None:
    project.write_overlay("", name)
    with pytest.raises(ToolError, match=f"overlay file {name} exists"):
        apply(project)


def test_fuzz_is_refused(project: Project) -> None:
    path = project.patches / "0001-first.patch"
    # One line of context that upstream does not have: fuzz 1 would take it.
    path.write_text(path.read_text().replace(" def three():", " def drei():"))
    with pytest.raises(ToolError, match="zero fuzz(.|\n)*0001-first.patch"):
        apply(project)


def test_unknown_tag_names_the_known_ones(project: Project) -> None:
    with pytest.raises(ToolError, match=r"TAG=v9 .*tags: v1\.0\.0"):
        apply_patches(project.layout, "v9")
