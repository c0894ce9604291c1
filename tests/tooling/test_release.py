# SPDX-License-Identifier: Apache-2.0
"""The steps of a release, without a forge: what users get is complete, the same bytes
twice, and installs; the workflow only calls what is tested here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from patchtool.config import Layout, ToolError
from patchtool.wheel import build_wheel
from tests.tooling.project import REPOSITORY, TAG, TAGS_OF_FILE, Project

sys.path.insert(0, str(REPOSITORY / "ci"))
import release  # noqa: E402

WHEEL = f"vllm-1.0.0+core.1-{TAGS_OF_FILE}.whl"
CHANGES = (
    "# Changelog\n\n## core.1, 2026-01-31\n\n- It exists.\n\n## core.0, x\n\nOld.\n"
)


def run(*words: str) -> None:
    """A command of the script, in the checkout that the environment names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["release", *words])
        assert release.main() == 0


@pytest.fixture
def folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a release of the synthetic checkout is made."""
    root, cache = project.layout.root, project.layout.cache
    (root / "CHANGELOG.md").write_text(CHANGES)
    (root / "README.md").write_text("How to install core.1.\n")
    (cache.parent / "vllm-kv-tier").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setenv("KV_TIER_ROOT", str(root))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "scripts"))
    return root / "build" / "release"


@pytest.fixture
def built(folder: Path) -> Path:
    run("wheels")
    return folder


# ------------------------------------------------------------------------- wheels


def test_what_is_built_and_what_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("plan")
    out, err = capsys.readouterr()
    wheels, images = (json.loads(line.partition("=")[2]) for line in out.splitlines())
    assert wheels == [{"tag": TAG, "device": "cuda"}]
    assert images == [TAG]
    assert err == f"not built: {TAG}, cpu: there is no CPU build of this release\n"
    with pytest.raises(ToolError, match="has no cpu wheel: there is no CPU build"):
        run("wheels", "--tags", TAG, "--devices", "cpu")


def test_every_kept_release_has_wheels_or_a_reason() -> None:
    layout = Layout.default()
    wheels = {tag for tag, _ in release.chosen(layout, [], [])}
    frozen = {line.split(",")[0] for line in release.left_out(layout)} - wheels
    assert wheels | frozen == set(layout.tags())
    assert frozen == set(release.FROZEN)


def test_a_second_build_elsewhere_gives_the_same_bytes(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("reproduce")
    assert "built again: 1\n" in capsys.readouterr().out
    with (built / WHEEL).open("ab") as wheel:
        wheel.write(b"\0")
    with pytest.raises(ToolError, match=r"core\.1.* has other bytes"):
        run("reproduce")
    (built / WHEEL).unlink()
    with pytest.raises(ToolError, match="build it first"):
        run("reproduce")


def test_sums(built: Path) -> None:
    (built / "another").write_text("x")
    run("sums")
    run("sums")
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    done = subprocess.run(check, cwd=built, capture_output=True, text=True)
    assert done.stdout == f"another: OK\n{WHEEL}: OK\n"


# -------------------------------------------------------------- version and changes


def test_a_release_is_checked(folder: Path) -> None:
    root = folder.parents[1]
    run("check", "core.1")
    (root / "README.md").write_text("core.1 is not released yet.\n")
    with pytest.raises(ToolError, match="README.md still says"):
        run("check", "core.1")
    with pytest.raises(ToolError, match="the tag is core.2, but the file VERSION says"):
        run("check", "core.2")
    (root / "VERSION").write_text("core.2\n")
    with pytest.raises(ToolError, match="no section `## core.2, DATE`"):
        run("check", "core.2")
    for heading in ("core.2, unreleased", "core.2"):
        (root / "CHANGELOG.md").write_text(f"## {heading}\n\nx\n")
        with pytest.raises(ToolError, match=f"says `## {heading}`; a release has a"):
            run("check", "core.2")
    (root / "CHANGELOG.md").write_text("## core.2, 2026-01-31\n\n## core.1\n\nx\n")
    with pytest.raises(ToolError, match="says nothing of core.2"):
        run("check", "core.2")
    (root / "VERSION").write_text("2.0\n")
    with pytest.raises(ToolError, match="must hold the version"):
        run("check", "2.0")


def test_the_changelog_has_the_version() -> None:
    heading, text = release.section(Layout.default())
    assert heading.startswith(f"{Layout.default().version}, ")
    assert "### What you must do" in text


NAMES_VERSION = [
    *sorted(p for p in (REPOSITORY / "deploy").rglob("*") if p.is_file()),
    REPOSITORY / "README.md",
    *(REPOSITORY / "docs" / f"{n}.md" for n in ("deploy", "first-hour", "upgrading")),
]
"""Recipes and pages with commands that install."""


def test_commands_that_install_name_the_version() -> None:
    found = {
        path.relative_to(REPOSITORY).as_posix(): set(versions)
        for path in NAMES_VERSION
        if (versions := re.findall(r"core\.\d+", path.read_text(errors="replace")))
    }
    assert len(found) >= 10
    version = Layout.default().version
    assert {p: v for p, v in found.items() if v != {version}} == {}


# -------------------------------------------------------------------- what is inside


def components(path: Path) -> dict[str, Any]:
    """Of an SBOM, by reference."""
    text = path.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    data = json.loads(text)
    (links,) = (d for d in data["dependencies"] if "dependsOn" in d)
    assert links["ref"] == data["metadata"]["component"]["bom-ref"]
    found = {part["bom-ref"]: part for part in data["components"]}
    assert sorted(links["dependsOn"]) == sorted(found)
    return found | {"": data["metadata"]["component"]}


def test_bill_of_materials(built: Path, project: Project) -> None:
    run("sbom")
    path = built / f"{WHEEL}.cdx.json"
    parts = components(path)

    def digest(name: str) -> str:
        (entry,) = parts[name]["hashes"]
        assert entry["alg"] == "SHA-256"
        return str(entry["content"])

    def of_file(path: Path) -> str:
        return sha256(path.read_bytes()).hexdigest()

    assert digest("") == of_file(built / WHEEL)
    assert parts[""]["purl"] == "pkg:pypi/vllm@1.0.0%2Bcore.1"
    base = f"vllm-1.0.0-{TAGS_OF_FILE}.whl"
    assert digest(base) in (project.patches / "upstream.toml").read_text()
    patch = f"patches/{TAG}/0001-first.patch"
    assert digest(patch) == of_file(project.layout.root / patch)
    module = "vllm/v1/kv_tier/value.py"
    assert digest(module) == of_file(project.layout.overlay / module)
    assert parts["numpy"]["purl"] == "pkg:pypi/numpy"
    assert parts["pandas; extra == 'bench'"]["scope"] == "optional"
    torch = 'torch==2.0.0+x; platform_machine == "x86_64"'
    assert parts[torch]["version"] == "2.0.0+x"
    before = path.read_bytes()
    run("sbom")
    assert path.read_bytes() == before


def test_an_invalid_bill_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"bomFormat": "CycloneDX", "specVersion": "1.6", "parts": []}')
    with pytest.raises(AssertionError):
        components(path)


def test_other_wheels_are_refused(folder: Path, project: Project) -> None:
    with pytest.raises(ToolError, match="has no wheel; run `wheels` first"):
        run("sbom")
    (upstream,) = project.layout.cache.glob(f"*/vllm-1.0.0-{TAGS_OF_FILE}.whl")
    folder.mkdir(parents=True)
    (folder / upstream.name).write_bytes(upstream.read_bytes())
    with pytest.raises(ToolError, match="was not built by this project"):
        run("sbom")


# ---------------------------------------------------------------------------- for pip


def test_pip_installs_from_the_index(built: Path, tmp_path: Path) -> None:
    run("sums")
    run("index")
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [
        str(tmp_path / "venv" / "bin" / "python"),
        "-m",
        "pip",
        "--isolated",
        "install",
    ]
    url = (built / "simple").as_uri()
    pip += ["--no-deps", "--no-cache-dir", "--index-url", url, "vllm==1.0.0+core.1"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    assert (site / "vllm/v1/kv_tier/value.py").read_text() == "VALUE = 1\n"
    # A wheel that was replaced is not installed.
    with (built / WHEEL).open("ab") as wheel:
        wheel.write(b"\0")
    done = subprocess.run([*pip, "--force-reinstall"], capture_output=True, text=True)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


def test_an_index_of_several_releases(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="has no SHA256SUMS; run `sums` first"):
        run("index")
    for number, lines in ((1, "aa  a+1.whl\nbb  a.whl.cdx.json\n"), (2, "cc  b.whl\n")):
        (tmp_path / f"core.{number}").mkdir()
        (tmp_path / f"core.{number}" / release.SUMS).write_text(lines)
    both = [str(tmp_path / f"core.{n}") for n in (1, 2)]
    out = tmp_path / "site" / "simple"
    run("index", *both, "--out", str(out), "--url", "https://host/download/")
    links = re.findall(r'href="(.*?)"', (out / "vllm" / "index.html").read_text())
    assert links == [
        "https://host/download/core.1/a%2B1.whl#sha256=aa",
        "https://host/download/core.2/b.whl#sha256=cc",
    ]
    assert 'href="vllm/"' in (out / "index.html").read_text()


def test_notes(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.md"
    run("notes", "--out", str(out), "--url", "https://host/simple/")
    text = out.read_text()
    assert text.startswith("- It exists.\n\n## Wheels\n")
    assert "Old." not in text
    install = (
        "    pip install vllm==1.0.0+core.1 --extra-index-url https://host/simple/\n"
    )
    assert install in text
    assert f"| {TAG} | cuda | x86_64 | >=3.10 | `{WHEEL}` | 0 |" in text
    assert f"- Not built: {TAG}, cpu: " in text


def test_trying_installs_and_asks(
    built: Path, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Python that only writes down what it gets."""
    with pytest.raises(ToolError, match="has no CPU wheel"):
        run("try")
    release.put(build_wheel(project.layout, TAG, "cpu", "x86_64"), built)
    log = program(tmp_path, "python", '[ "$2" != pip ] && echo "$PYTHONPATH"; true')

    def create(target: Path, with_pip: bool) -> None:
        (target / "bin").mkdir(parents=True)
        (target / "bin" / "python").symlink_to(tmp_path / "python")

    monkeypatch.setattr(release.venv, "create", create)
    run("try")
    pip, answer = log.read_text().splitlines()
    index = (built / "simple").as_uri()
    wish = f"--extra-index-url {index} vllm==1.0.0+core.1.cputest"
    assert pip == f"-m pip install -qq {wish}"
    assert answer.split()[0] == str(REPOSITORY / "ci" / "first_answer.py")
    assert not (project.layout.build / "try").exists()


# --------------------------------------------------------------- programs of the forge


def program(folder: Path, name: str, text: str) -> Path:
    """A program that writes its arguments down, and then does what `text` says."""
    log = folder / f"{name}.log"
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(log))}\n{text}\n')
    path.chmod(0o755)
    return log


def test_image(
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = built.parent / "image.json"
    digest = '{"containerimage.digest": "sha256:ab"}'
    log = program(tmp_path, "docker", f"echo '{digest}' >{shlex.quote(str(about))}")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(release, "host_arch", lambda: "x86_64")
    capsys.readouterr()
    run("image", TAG, "host/Some/Name")
    assert capsys.readouterr().out == "name=host/some/name\ndigest=sha256:ab\n"
    line = log.read_text()
    assert f"--build-arg TAG={TAG} --build-arg CORE=core.1" in line
    assert f"--tag host/some/name:{TAG}-core.1 --push" in line
    assert (built.parent / "wheels" / WHEEL).is_file()
    program(tmp_path, "docker", "exit 1")
    with pytest.raises(ToolError, match="docker build .* failed"):
        run("image", TAG, "host/Some/Name")


def test_sums_of_earlier_releases(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = program(
        tmp_path, "gh", '[ "$2" = list ] && printf "core.2\\nold\\ncore.1\\n"; true'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    run("published")
    downloads = [line.split() for line in log.read_text().splitlines()[1:]]
    assert [line[2] for line in downloads] == ["core.2", "core.1"]
    assert downloads[0][-1] == str(folder.parent / "releases" / "core.2")


# ------------------------------------------------------------------------ the workflows

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
NAMES = [path.name for path in WORKFLOWS]
LINTERS = (
    ("check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
    ("zizmor", "--offline", "--no-progress"),
)


def lint(linter: tuple[str, ...], path: Path) -> str:
    """What a linter has against a workflow; empty for nothing."""
    done = subprocess.run([*linter, path], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("linter", LINTERS, ids=lambda linter: linter[0])
@pytest.mark.parametrize("path", WORKFLOWS, ids=NAMES)
def test_workflows(path: Path, linter: tuple[str, ...]) -> None:
    assert lint(linter, path) == ""


@pytest.mark.parametrize(
    "linter, old, new, message",
    [
        (LINTERS[0], "runs-on", "runs_on", "runs_on"),
        (LINTERS[1], '"$GITHUB_REF_NAME"', "${{ github.ref_name }}", "injection"),
        (
            LINTERS[1],
            "actions/checkout@v4",
            "other/checkout@v4",
            "not pinned to a hash",
        ),
    ],
)
def test_faults_of_workflows_are_found(
    tmp_path: Path, linter: tuple[str, ...], old: str, new: str, message: str
) -> None:
    github = REPOSITORY / ".github"
    path = tmp_path / ".github" / "workflows" / "release.yml"
    path.parent.mkdir(parents=True)
    text = (github / "workflows" / "release.yml").read_text()
    path.write_text(text.replace(old, new, 1))
    (tmp_path / ".github" / "zizmor.yml").write_bytes(
        (github / "zizmor.yml").read_bytes()
    )
    assert message in lint(linter, path)


def steps() -> Iterator[dict[str, Any]]:
    text = (REPOSITORY / ".github" / "workflows" / "release.yml").read_text()
    for job in yaml.safe_load(text)["jobs"].values():
        yield from job["steps"]


def test_the_release_only_calls_commands_that_exist() -> None:
    """Each `run` is one command: of the script, or of a program that a runner has."""
    called = set()
    for line in (step["run"] for step in steps() if "run" in step):
        assert "\n" not in line.strip(), line
        words = shlex.split(line.partition(">>")[0])
        if words[:2] == ["python3", "ci/release.py"]:
            called.add(words[2])
            # Only the shell knows the values of variables.
            known = ["cuda" if w == "$DEVICE" else w for w in words[2:]]
            release._parser().parse_args(known)
        else:
            assert words[0] in ("sudo", "python3", "gh", "docker", "mkdocs"), line
    assert called == {
        *("check", "plan", "wheels", "reproduce", "sbom", "sums", "index"),
        *("try", "notes", "published", "image"),
    }


def test_the_release_uses_the_forge_s_own_actions() -> None:
    used = {step["uses"].partition("/")[0] for step in steps() if "uses" in step}
    assert used == {"actions"}
