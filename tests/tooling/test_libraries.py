# SPDX-License-Identifier: Apache-2.0
"""Stand-ins and weak needs: real libraries, loaded by a real process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from patchtool.libraries import NO_DEVICE, weaken, write_stubs


def compile_library(path: Path, source: str, *flags: str) -> None:
    code = path.with_suffix(".c")
    code.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), str(code), *flags]
    subprocess.run(command, check=True)
    code.unlink()


@pytest.fixture
def torch_lib(tmp_path: Path) -> Path:
    """A library that needs two of NVIDIA's, one with symbol versions; both are gone."""
    folder = tmp_path / "lib"
    folder.mkdir()
    table = tmp_path / "versions"
    table.write_text("libcudart.so.99 { global: *; };")
    runtime, solver = folder / "libcudart.so.99", folder / "libcusolver.so.9"
    compile_library(
        runtime,
        "int cudaGetDeviceCount(void) { return 0; }",
        f"-Wl,--version-script={table},-soname,{runtime.name}",
    )
    compile_library(
        solver, "int cusolverDnCreate(void) { return 0; }", f"-Wl,-soname,{solver.name}"
    )
    compile_library(
        folder / "libtorch_cuda.so",
        "int cudaGetDeviceCount(void); int cusolverDnCreate(void);"
        "int count(void) { return cudaGetDeviceCount() + cusolverDnCreate(); }",
        *(str(runtime), str(solver), "-Wl,-rpath,$ORIGIN"),
    )
    runtime.unlink()
    solver.unlink()
    return folder


def count(folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import ctypes; print(ctypes.CDLL('{folder}/libtorch_cuda.so').count())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_library_loads_and_finds_no_device(torch_lib: Path) -> None:
    assert count(torch_lib).returncode != 0
    assert write_stubs(torch_lib) == ["libcudart.so.99", "libcusolver.so.9"]
    found = count(torch_lib)
    assert (found.stdout.strip(), found.stderr) == (str(2 * NO_DEVICE), "")
    # Nothing more is needed.
    assert write_stubs(torch_lib) == []


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libcopy.so"
    code = "int copied(char *a, const char *b, int n) { memcpy(a, b, n); return n; }"
    compile_library(path, f"#include <string.h>\n{code}", "-fno-builtin")
    return path


def needs(library: Path) -> dict[str, bool]:
    """Versions that a library needs, and whether it only wishes them."""
    text = subprocess.check_output(["readelf", "-V", str(library)], text=True)
    lines = (line.split() for line in text.splitlines() if "Flags:" in line)
    return {line[line.index("Name:") + 1]: "WEAK" in line for line in lines}


def test_only_the_named_versions_become_weak(library: Path) -> None:
    before = needs(library)
    assert before and not any(before.values())
    version = max(before)
    cached = library.with_name("cached.so")
    cached.hardlink_to(library)
    assert weaken(library, [version]) == 1
    assert needs(library) == {name: name == version for name in before}
    # Never through a hard link, and it loads.
    assert needs(cached) == before
    assert ctypes.CDLL(str(library)).copied(b"12", b"34", 2) == 2


def test_others_are_left_alone(library: Path) -> None:
    content = library.read_bytes()
    assert weaken(library, ["GLIBCXX_3.4.32"]) == 0
    assert library.read_bytes() == content
