# SPDX-License-Identifier: Apache-2.0
"""A folder with what upstream's tests import beside vLLM: pytest, torchvision.

It goes onto PYTHONPATH of the test run; the environment under test is not touched.
"""

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
TORCHVISION_CHECK = "from torchvision.transforms.v2 import functional"


def make_tools(
    python: Path, python_version: str, torch_version: str, folder: Path
) -> None:
    """Install the test tools for `python` into `folder`, once.

    Args:
        python: Interpreter of the environment under test.
        python_version: Its version, such as `3.11.7`.
        torch_version: Its torch, such as `2.13.0+cpu`; picks torchvision's release.
        folder: Where to install; finished installs are kept.

    Raises:
        SystemExit: pip failed, or torchvision cannot be imported.

    """
    wanted = f"{REQUIREMENTS.read_text()}{python_version} {torch_version}"
    stamp = folder / ".complete"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    _install(python, folder, "-r", str(REQUIREMENTS))
    _install(python, folder, torchvision_for(torch_version))
    _make_importable(python, folder)
    stamp.write_text(wanted)


def torchvision_for(torch_version: str) -> str:
    """The requirement for torchvision's release of a torch: 2.13.0 -> 0.28.*."""
    minor = int(torch_version.split(".")[1])
    return f"torchvision==0.{minor + 15}.*"


def _install(python: Path, folder: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    flags = ["--no-deps", "--upgrade", "--no-compile", "--target", str(folder)]
    if subprocess.run([*pip, *flags, *what]).returncode:
        raise SystemExit(
            f"pip could not install {' '.join(what)} for {python}. Its output above "
            "says why; pip must be 22.3 or newer and reach a package index."
        )


def _make_importable(python: Path, folder: Path) -> None:
    """Let torchvision's Python part be imported beside a CPU torch.

    The default index has torchvision built for CUDA, whose operators do not load
    beside a CPU torch, and the modules that register rules for these operators then
    break the import. The tests need the import only, so these modules go.
    """
    env = {**os.environ, "PYTHONPATH": str(folder)}
    check = [str(python), "-c", TORCHVISION_CHECK]
    if subprocess.run(check, env=env, capture_output=True).returncode == 0:
        return
    for name in ("_meta_registrations.py", "_autograd_registrations.py"):
        (folder / "torchvision" / name).write_text("")
    failed = subprocess.run(check, env=env, capture_output=True, text=True)
    if failed.returncode:
        raise SystemExit(
            f"torchvision in {folder} cannot be imported by {python}:\n{failed.stderr}"
        )
