# SPDX-License-Identifier: Apache-2.0
"""`make env`: what failed once is not taken for done the next time."""

import json
from pathlib import Path

import pytest

from patchtool import env
from patchtool.config import ToolError
from tests.tooling.project import TAG, Project


def fake_uv(folder: Path) -> Path:
    """Makes a venv whose `vllm` ends as the file `status` says."""
    uv = folder / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        f"echo run >>{folder}/runs\n"
        'for last; do :; done\n[ "$1" = venv ] || exit 0\n'
        'mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"\n'
        f'printf "#!/bin/sh\\necho vLLM 1.0; exit $(cat {folder}/status)\\n"'
        ' >"$last/bin/vllm"\nchmod +x "$last/bin/vllm"\n'
    )
    uv.chmod(0o755)
    return uv


def test_a_first_start_that_fails(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = fake_uv(tmp_path)
    (project.layout.root / env.REQUIREMENTS).parent.mkdir()
    (project.layout.root / env.REQUIREMENTS).write_text("")
    monkeypatch.setenv("KV_TIER_NVIDIA", "1")
    monkeypatch.setattr(env, "find_uv", lambda layout: str(uv))
    (tmp_path / "status").write_text("1")
    for _ in range(2):
        with pytest.raises(ToolError, match="vllm --version fails"):
            env.make_env(project.layout, TAG)
        assert not env.has_env(project.layout, TAG)
    (tmp_path / "status").write_text("0")
    env.make_env(project.layout, TAG)
    assert env.has_env(project.layout, TAG)
    runs = (tmp_path / "runs").read_text()
    env.make_env(project.layout, TAG)
    assert (tmp_path / "runs").read_text() == runs
    stamp = json.loads((project.layout.env(TAG) / env.STAMP).read_text())
    assert "vllm/count.py" in stamp["files"]
