# SPDX-License-Identifier: Apache-2.0
"""Wheels: valid, complete, the same bytes twice, and honest about what they are."""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patchtool.config import ToolError
from patchtool.metadata import cpu_requirements, version_module
from patchtool.tree import BUILD_INFO
from patchtool.wheel import build_wheel
from tests.tooling.project import TAG, TAGS_OF_FILE, Project, make_wheel, upstream


def build(project: Project, device: str = "cuda") -> Path:
    return build_wheel(project.layout, TAG, device, "x86_64")


def check_record(path: Path) -> None:
    """Every file is in RECORD once, with its hash and size, and the other way round."""
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        (record,) = (n for n in wheel.namelist() if n.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(wheel.read(record).decode().splitlines()))
        assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
        for name, digest, size in rows:
            data = wheel.read(name)
            if name == record:
                assert (digest, size) == ("", "")
                continue
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            assert digest == f"sha256={found.rstrip(b'=').decode()}"
            assert int(size) == len(data)


def test_cuda_wheel(project: Project, tmp_path: Path) -> None:
    path = build(project)
    assert path.name == f"vllm-1.0.0+core.1-{TAGS_OF_FILE}.whl"
    check_record(path)
    target = tmp_path / "installed"
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(target)
        mode = wheel.getinfo("vllm-1.0.0+core.1.data/scripts/tool").external_attr >> 16
        assert mode == 0o100755
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version) == ("vllm", "1.0.0+core.1")
    assert found.metadata["Requires-Python"] == ">=3.10"
    assert 'torch==2.0.0+x; platform_machine == "x86_64"' in (found.requires or [])
    assert (found.read_text("METADATA") or "").endswith("\n\nThe text.\n")
    assert f"Tag: {TAGS_OF_FILE}\n" in (found.read_text("WHEEL") or "")
    code = (
        "from vllm import _version as v, count; from vllm.v1 import pool;"
        "from vllm.v1.kv_tier import value;"
        "print(v.version, v.version_tuple, count.two(), pool.Pool.size, value.VALUE)"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=target, text=True)
    assert shown == "1.0.0+core.1 (1, 0, 0, 'core.1') 22 7 1\n"
    info = json.loads((target / BUILD_INFO).read_text())
    assert (info["version"], info["device"]) == ("1.0.0+core.1", "cuda")
    assert (target / "vllm/_C.abi3.so").read_bytes().startswith(b"\x7fELF")


def test_same_bytes_twice(project: Project) -> None:
    first = build(project).read_bytes()
    previous = os.umask(0o077)
    try:
        os.utime(project.tree / "vllm/count.py", (1, 1))
        assert build(project).read_bytes() == first
    finally:
        os.umask(previous)


def test_an_overlay_change_changes_the_wheel(project: Project) -> None:
    first = build(project).read_bytes()
    project.write_overlay("VALUE = 2\n")
    path = build(project)
    assert path.read_bytes() != first
    with zipfile.ZipFile(path) as wheel:
        assert wheel.read("vllm/v1/kv_tier/value.py") == b"VALUE = 2\n"


def test_test_only_wheel_takes_compiled_files_only(project: Project) -> None:
    path = build(project, "cpu")
    assert path.name == f"vllm-1.0.0+core.1.cputest-{TAGS_OF_FILE}.whl"
    check_record(path)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        version = wheel.read("vllm/_version.py").decode()
        metadata = wheel.read("vllm-1.0.0+core.1.cputest.dist-info/METADATA").decode()
    assert "version = '1.0.0+core.1.cputest'" in version
    assert "vllm/_C.abi3.so" in names
    assert "tests/test_count.py" not in names
    assert "Name: vllm\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert 'Requires-Dist: torchvision; extra == "media"\n' in metadata
    assert "Requires-Dist: newcomer\n" in metadata
    assert "Requires-Dist: torch==2.0.0\n" in metadata


def test_base_with_another_file_than_the_sdist_is_refused(project: Project) -> None:
    files = upstream("1.0.0") | {"vllm/count.py": "def two():\n    return 2.5\n"}
    content = make_wheel("vllm", "1.0.0", files)
    pin = project.cached(f"vllm-1.0.0-{TAGS_OF_FILE}.whl", content)
    pins = project.patches / "upstream.toml"
    before, after = pins.read_text().split("[cuda.x86_64]")
    old = after.split('sha256 = "')[1].split('"')[0]
    pins.write_text(f"{before}[cuda.x86_64]{after.replace(old, pin.sha256)}")
    with pytest.raises(ToolError, match="vllm/count.py of .* is not the file of"):
        build(project)


@pytest.mark.parametrize(
    "device, arch, message",
    [
        ("tpu", "x86_64", "DEVICE=tpu is not known"),
        ("cuda", "riscv64", r"ARCH=riscv64 .* pinned: \['x86_64'\]"),
    ],
)
def test_nothing_pinned(project: Project, device: str, arch: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        build_wheel(project.layout, TAG, device, arch)


def test_version_module_must_be_as_upstream_writes_it() -> None:
    with pytest.raises(ToolError, match="no single line"):
        version_module("version = '1.0.0'\n", "1.0.0+core.1")


def test_cpu_requirements() -> None:
    base = [
        "numpy>=1",
        'torch==2.0.0+cpu; platform_machine == "x86_64"',
        'torchvision; platform_machine != "s390x"',
        'torchvision; extra == "bench"',
        "typing_extensions",
    ]
    common = ["numpy >= 2", "typing-extensions", "orjson >= 3"]
    assert cpu_requirements(base, common, "2.0.0", ("torchvision",)) == [
        "numpy>=1",
        'torchvision; (platform_machine != "s390x") and extra == "media"',
        'torchvision; extra == "bench"',
        "typing_extensions",
        "orjson",
        "torch==2.0.0",
    ]
