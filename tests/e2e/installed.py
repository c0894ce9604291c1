# SPDX-License-Identifier: Apache-2.0
"""Packages that only some tests see, each in a folder of its own.

They are not installed into the environment: vLLM takes them into account wherever it
finds them.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def installed(name: str) -> str:
    """The folder with what `ci/requirements-NAME.txt` names, for `PYTHONPATH`.

    It is installed there when it is first asked for.
    """
    requirements = ROOT / "ci" / f"requirements-{name}.txt"
    # Wheels are for one Python.
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    folder = ROOT / "build" / name / python
    done = folder / "requirements.txt"
    if not done.is_file() or done.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        # Environments have no pip of their own.
        with tempfile.TemporaryDirectory() as temporary:
            python_of_pip = Path(temporary) / "bin" / "python"
            subprocess.run([sys.executable, "-m", "venv", temporary], check=True)
            pip: list[str | Path] = [python_of_pip, "-m", "pip", "install", "-q"]
            flags: list[str | Path] = ["--no-deps", "--only-binary", ":all:"]
            what: list[str | Path] = ["--target", folder, "-r", requirements]
            subprocess.run([*pip, *flags, *what], check=True, timeout=600)
        done.write_text(requirements.read_text())
    return str(folder)
