# SPDX-License-Identifier: Apache-2.0
"""Version needs of a real library, as the linker wrote them."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from patchtool.symbols import weaken

SOURCE = """
#include <string.h>
int copied(char *to, const char *from, int n) { memcpy(to, from, n); return n; }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "copy.c").write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-o", "libcopy.so", "copy.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "libcopy.so"


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
