# SPDX-License-Identifier: Apache-2.0
"""`make check-patches` passes what is right and finds each way to be wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from patchtool import importcheck
from patchtool.check import check_patches, check_tag
from patchtool.config import Patch, ToolError, check_tag_name, load_pins
from patchtool.hunks import diff
from patchtool.names import lint
from patchtool.series import refresh
from patchtool.states import State
from tests.tooling.project import HEADER, TAG, Project, make_sdist, upstream


def edit(project: Project, number: int, old: str, new: str) -> None:
    (path,) = project.patches.glob(f"000{number}-*.patch")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_good_series_passes(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    check_patches(project.layout, [TAG])
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "8 upstream lines touched" in out
    assert "imports NOT checked" in out


OFFSET = (1, "@@ -3,7 +3,7 @@", "@@ -4,7 +4,7 @@")
TIMESTAMP = (1, "+++ b/vllm/count.py", "+++ b/vllm/count.py\t2026-01-01")
NAMES = "0001-first.patch\n0002-second.patch\n"
LINES = "".join(f"+LINE_{n} = {n}\n" for n in range(201))


def write(name: str, text: str = "") -> Callable[[Project], object]:
    return lambda project: (project.patches / name).write_text(text)


def overlay(*args: str) -> Callable[[Project], object]:
    return lambda project: project.write_overlay(*args)


def not_there(project: Project) -> None:
    (project.patches / "0002-second.patch").unlink()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (write("0003-stray.patch"), "0003-stray.patch"),
        (write("notes.txt"), "notes.txt"),
        (not_there, "names 0002-second.patch, which is not"),
        (write("series", f"{NAMES}0001-first.patch\n"), "more than once"),
        (
            (1, "Forwarded: not-needed\n", ""),
            r"0001-first.patch: the header lacks \['Forwarded'\]",
        ),
        (
            (2, "Retires-when: never", "Retires-when:"),
            r"0002-second.patch: the header lacks \['Retires-when'\]",
        ),
        (
            (1, " Because the tests need it.\n", ""),
            "no second line with the reason",
        ),
        (
            write("0001-first.patch", HEADER.format(title="first")),
            r"\['0001-first.patch'\] change nothing",
        ),
        ((1, "2026-01-01", "yesterday"), "'yesterday' is not YYYY-MM-DD"),
        ((1, " def three():", " def drei():"), "0001-first.patch does not apply"),
        (OFFSET, r"refresh` changes \['0001-first.patch'\]"),
        (TIMESTAMP, r"refresh` changes \['0001-first.patch'\]"),
        (
            (1, "+    return 22", "+    return return"),
            "prefix up to 0001-first.patch: vllm/count.py does not compile",
        ),
        (
            (2, "@@ -0,0 +1 @@\n", "@@ -0,0 +1,202 @@\n" + LINES),
            "adds and removes 209 lines",
        ),
        (overlay("", "vllm/count.py"), "has overlay files: .*vllm/count.py"),
        (overlay("", "vllm/v1/seam.py"), "has overlay files: .*vllm/v1/seam.py"),
        (
            overlay("from vllm import __version__\n"),
            "value.py looks at a version",
        ),
    ],
)
def test_a_bad_one_is_found(
    project: Project,
    spoil: tuple[int, str, str] | Callable[[Project], object],
    message: str,
) -> None:
    if isinstance(spoil, tuple):
        edit(project, *spoil)
    else:
        spoil(project)
    errors = check_tag(project.layout, TAG)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(errors))
    with pytest.raises(ToolError, match="failed, see FAIL above"):
        check_patches(project.layout, [TAG])


def test_another_pinned_sdist_is_unpacked(project: Project) -> None:
    assert check_tag(project.layout, TAG) == []
    pins = load_pins(project.layout, TAG)
    files = upstream("1.0.0") | {"vllm/count.py": "A = 1\n"}
    sdist = project.cached("vllm-1.0.0.tar.gz", make_sdist("1.0.0", files))
    project.write_pins(replace(pins, sdist=sdist))
    assert "does not apply" in check_tag(project.layout, TAG)[0]


def test_refresh_corrects_what_it_can_and_keeps_headers(project: Project) -> None:
    good = (project.patches / "0001-first.patch").read_text()
    edit(project, *OFFSET)
    edit(project, *TIMESTAMP)
    refresh(project.layout, TAG)
    assert (project.patches / "0001-first.patch").read_text() == good
    assert check_tag(project.layout, TAG) == []


@pytest.mark.parametrize(
    "before, added, message",
    [
        ("def f(a):\n", ["    return b"], "vllm/a.py:2: Undefined name `b`"),
        ("def f(a):\n", ["    return a"], ""),
        # Upstream's own.
        ("import os\n\n\ndef f():\n    return c\n", ["    x = 1"], ""),
        ("A = 1\n", ["import os"], "vllm/a.py:2: `os` imported but unused"),
        (
            "import os\nA = os.sep\n",
            ["from os import sep", "from os import sep", "B = sep"],
            "vllm/a.py:4: Redefinition of unused `sep`",
        ),
    ],
)
def test_names_that_are_not_there_or_not_needed(
    tmp_path: Path, before: str, added: list[str], message: str
) -> None:
    after = before + "".join(f"{line}\n" for line in added)
    texts = {"upstream": before, "1": after}
    for folder, text in texts.items():
        (tmp_path / folder / "vllm").mkdir(parents=True)
        (tmp_path / folder / "vllm" / "a.py").write_text(text)
    patch = tmp_path / "1.patch"
    sides = ({"vllm/a.py": before}, {"vllm/a.py": after})
    patch.write_text(diff(*sides))
    ruff = Path(sys.executable).with_name("ruff")
    state = State(Patch(patch), *sides)
    found = lint(ruff, tmp_path / "upstream", [tmp_path / "1"], [state])
    assert found.startswith(f"prefix up to 1.patch: {message}" if message else "")
    assert bool(found) == bool(message)


def test_names_are_looked_for_without_an_environment(project: Project) -> None:
    """Of the tag: one that cannot start for such a name has none."""
    path = project.layout.env(TAG) / "bin" / "ruff"
    path.parent.mkdir(parents=True)
    path.symlink_to(Path(sys.executable).with_name("ruff"))
    edit(project, 1, "+    return 22", "+    return TWO")
    (error,) = check_tag(project.layout, TAG)
    assert "0001-first.patch: vllm/count.py:6: Undefined name `TWO`" in error


INSTALLED = {"__init__": "", "a": "1/0", "b": "B = 1", "c": "1/0"}


def run_imports(
    tmp_path: Path,
    prefixes: list[dict[str, str]],
    installed: dict[str, str] = INSTALLED,
) -> list[str]:
    """Import module `vllm.a` for each prefix, given as files and their texts."""
    package = tmp_path / "installed" / "vllm"
    package.mkdir(parents=True)
    for name, text in installed.items():
        (package / f"{name}.py").write_text(text)
    steps = []
    for number, files in enumerate(prefixes):
        folder = tmp_path / str(number)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        later = {
            f for more in prefixes[number:] for f, _ in more.items() ^ files.items()
        }
        steps.append([str(folder), ["vllm.a"], [*map(importcheck.module_name, later)]])
    job = {
        "files": ["vllm/a.py", "vllm/c.py"],
        "prefixes": steps,
        "preload": ["json"],
        "results": str(tmp_path / "results.json"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, importcheck.__file__, str(tmp_path / "job.json")],
        env={"PYTHONPATH": str(package.parent)},
        check=True,
    )
    return json.loads((tmp_path / "results.json").read_text())


def test_each_prefix_is_imported_on_its_own(tmp_path: Path) -> None:
    good, bad, early, ends = run_imports(
        tmp_path,
        [
            {"vllm/a.py": "from vllm.b import B\nimport vllm.c", "vllm/c.py": ""},
            {"vllm/a.py": "from vllm.b import MISSING"},
            # The installed c.py is of the whole series: this prefix has none yet.
            {"vllm/a.py": "import vllm.c"},
            {"vllm/a.py": "import os\nos._exit(3)"},
        ],
    )
    assert good == ""
    assert "cannot import name 'MISSING'" in bad
    assert "No module named 'vllm.c'" in early
    assert "ended the process" in ends


@pytest.mark.parametrize(
    "uses, again",
    [
        ("", False),
        ("import vllm.c", True),
        ("from . import c", True),
        ("from vllm.d import C", True),
        ("import importlib; importlib.import_module('vllm.c')", True),
    ],
)
def test_what_no_later_patch_has_to_do_with_is_imported_once(
    tmp_path: Path, uses: str, again: bool
) -> None:
    """Once in a child, and once for all children behind it."""
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write('b')\n"
    installed = {"__init__": "", "b": note + uses, "d": "from vllm.c import C"}
    prefixes = [
        {"vllm/a.py": "import vllm.b, vllm.c", "vllm/c.py": f"C = {n}"}
        for n in range(4)
    ]
    assert run_imports(tmp_path, prefixes, installed) == [""] * 4
    assert log.read_text() == "b" * (4 if again else 2)


@pytest.mark.parametrize("tag", ["v0.33.0", "v0.8.5.post1", "v0.10.1.1"])
def test_names_of_releases(tag: str) -> None:
    check_tag_name(tag)


@pytest.mark.parametrize(
    "tag, advice", [("0.31.0", "write TAG=v0.31.0"), ("latest", "as v0.33.0 is$")]
)
def test_names_of_no_release(tag: str, advice: str) -> None:
    with pytest.raises(ToolError, match=advice):
        check_tag_name(tag)
