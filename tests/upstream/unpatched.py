# SPDX-License-Identifier: Apache-2.0
"""The build under test without the series: a venv in front of the patched one.

It has a `vllm` package of its own, the installed one with upstream's files where
`make env` changed any, and takes all else from the venv of the patched build. So both
have the same compiled files and dependencies, and a difference of results is one of
the series and the overlay.
"""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

STAMP = ".kv-tier-env.json"
"""What `make env` leaves in a venv: the files it changed, below `files`."""


def make_unpatched(package: Path, sdist: Path, python: Path, folder: Path) -> Path:
    """Make the venv anew; takes seconds.

    Args:
        package: The installed, patched `vllm`.
        sdist: Upstream's tarball of the same release.
        python: Interpreter of its venv, which `make env` made.
        folder: Where to make the new one.

    Returns:
        Its interpreter.

    Raises:
        SystemExit: The venv cannot be made, or the arguments are not what they should.

    """
    if not (sdist.is_file() and tarfile.is_tarfile(sdist)):
        raise SystemExit(
            f"--sdist {sdist} is no tarball. Give the pinned vllm-*.tar.gz."
        )
    stamp = python.parents[1] / STAMP
    if not stamp.is_file():
        raise SystemExit(f"--python {python} is not of `make env`: {stamp} is missing.")
    changed = set(json.loads(stamp.read_text())["files"])
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), "-m", "venv", "--without-pip", str(folder)]
    if subprocess.run(command).returncode:
        raise SystemExit(f"{' '.join(command)} failed, see above.")
    (site,) = folder.glob("lib/python3.*/site-packages")
    # Comes behind this venv's own packages.
    (site / "patched.pth").write_text(f"{package.parent}\n")
    shutil.copytree(package, site / "vllm", symlinks=True)
    for name in changed:
        (site / name).unlink(missing_ok=True)
    with tarfile.open(sdist) as tar:
        for member in tar:
            _, _, member.name = member.name.partition("/")
            if member.name in changed:
                tar.extract(member, site, filter="data")
    return folder / "bin" / "python"
