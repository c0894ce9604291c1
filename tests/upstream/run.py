# SPDX-License-Identifier: Apache-2.0
"""Run upstream vLLM's own tests on a CPU build, without GPU and model hub.

usage: python -m tests.upstream.run --tag v0.32.0 --python VENV/bin/python \
           --sdist vllm-0.32.0.tar.gz --suite core --mode off --out DIR --check

Writes DIR/TAG-SUITE-MODE.json, `{node id: outcome}`, and .xml (junit) beside it.
Failing tests do not fail the run, only differences do: --check compares with what
an unpatched build gave, `python -m tests.upstream.compare` compares any two runs.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.upstream import compare
from tests.upstream.results import counts, listed, load, save_baseline
from tests.upstream.tools import make_tools

HERE = Path(__file__).parent
SUITES = ("core", "full")
DIFFERS: dict[str, tuple[str, ...]] = {
    "off": (),
    "swapped": ("swapped_differs.txt",),
    "pressed": ("swapped_differs.txt", "pressed_differs.txt"),
}
"""Mode to the lists of tests that differ from the baseline, rightly."""
TEST_TIMEOUT_S = 120
NOT_INHERITED = ("VLLM_", "HF_", "TRANSFORMERS_", "PYTEST_", "PYTHON")
"""Prefixes of environment variables on which the outcome must not depend, and
PYTHONDONTWRITEBYTECODE, with which each import of vLLM takes twice as long."""

PROBE = """
import importlib.metadata, importlib.util, json, platform
spec = importlib.util.find_spec("vllm")
torch = importlib.metadata.version("torch")
print(json.dumps([spec.origin, torch, platform.python_version()]))
"""


@dataclass
class Build:
    """The vLLM under test."""

    python: Path
    python_version: str
    package: Path
    """Folder of the `vllm` package."""
    torch_version: str

    @classmethod
    def probe(cls, python: Path, tag: str) -> "Build":
        """Look at an environment without importing vLLM.

        Raises:
            SystemExit: It has no vLLM, or not that of the tag.

        """
        # In a folder of ours: a `vllm` in the current folder is not the build.
        run = subprocess.run(
            [str(python), "-c", PROBE], cwd=HERE, capture_output=True, text=True
        )
        if run.returncode:
            raise SystemExit(
                f"--python {python} has no vLLM with torch. Give the Python of an "
                f"environment with a CPU build of {tag}.\n{run.stderr}"
            )
        origin, torch_version, python_version = json.loads(run.stdout)
        build = cls(python, python_version, Path(origin).parent, torch_version)
        version = build.version()
        if version != tag.removeprefix("v"):
            raise SystemExit(
                f"--python {python} holds vLLM {version}, but --tag says {tag}. "
                "Upstream's tests fit their own release only: give the other Python, "
                "or the other tag."
            )
        return build

    def version(self) -> str:
        """Release of the package, without local segment."""
        text = (self.package / "_version.py").read_text()
        found = re.search(r"^__version__ = .*?['\"]([\d.]+)", text, re.MULTILINE)
        return found[1] if found else "unknown"

    @property
    def patched(self) -> bool:
        return (self.package / "v1" / "kv_tier").is_dir()


def extract_tests(sdist: Path, folder: Path) -> None:
    """Put `tests/` and `pyproject.toml` of an sdist into a folder of their own.

    Away from the source tree, whose `vllm/` would shadow the build under test.

    Args:
        sdist: Source tree, or its tarball.
        folder: Emptied first.

    Raises:
        SystemExit: `sdist` is neither.

    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if sdist.is_dir() and (sdist / "tests").is_dir():
        shutil.copytree(sdist / "tests", folder / "tests")
        shutil.copy(sdist / "pyproject.toml", folder)
    elif sdist.is_file() and tarfile.is_tarfile(sdist):
        with tarfile.open(sdist) as tar:
            for member in tar:
                _, _, member.name = member.name.partition("/")
                if member.name.startswith("tests/") or member.name == "pyproject.toml":
                    tar.extract(member, folder, filter="data")
    if not (folder / "tests" / "conftest.py").is_file():
        raise SystemExit(
            f"--sdist {sdist} is neither vLLM's source tree nor its tarball. Give "
            "the pinned vllm-*.tar.gz, or the folder it unpacks to."
        )


def selection(suite: str, tree: Path) -> list[str]:
    """pytest arguments that select a suite's tests.

    Raises:
        SystemExit: A listed path is not in `tree`.

    """
    deselected = listed(HERE / "deselect.txt")
    paths = listed(HERE / "suites" / f"{suite}.txt")
    for path in paths + deselected:
        if not (tree / path.partition("::")[0]).exists():
            raise SystemExit(
                f"{path} is listed in {HERE.name}/, but this release has no such "
                "tests. Follow upstream's rename in suites/*.txt and deselect.txt."
            )
    flags = [
        f"--deselect={path}" if "::" in path else f"--ignore={path}"
        for path in deselected
    ]
    return paths + flags


def environment(out: Path, tree: Path) -> dict[str, str]:
    """Environment variables of the test run."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, out / "tools", HERE))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HOME": str(out / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(out / "cache" / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def make_hub(build: Build, out: Path, tree: Path) -> None:
    """Make the stand-ins for hub models in `out`/hub, unless they are there."""
    script = HERE / "hub.py"
    stamp = out / "hub" / ".complete"
    if stamp.is_file() and stamp.read_text() == script.read_text():
        return
    shutil.rmtree(out / "hub", ignore_errors=True)
    command = [str(build.python), str(script), str(out / "hub")]
    if subprocess.run(command, env=environment(out, tree)).returncode:
        raise SystemExit(
            f"{' '.join(command)} failed, see above: the stand-ins for hub models "
            "do not fit this environment's transformers."
        )
    stamp.write_text(script.read_text())


def run_pytest(build: Build, args: argparse.Namespace, out: Path, tree: Path) -> Path:
    """Run the suite; return the JSON file with its outcomes.

    Raises:
        SystemExit: pytest did not come to its end.

    """
    result = out / f"{args.tag}-{args.suite}-{args.mode}.json"
    result.unlink(missing_ok=True)
    plugins = ["pytest_asyncio.plugin", "pytest_mock", "pytest_timeout"]
    plugins += ["record_plugin"] + ["swap_plugin"] * (args.mode != "off")
    # pytest's own tracebacks parse the sources, for which Python 3.11 fails at times
    # after a RecursionError (CPython issue 106905).
    command = [str(build.python), "-m", "pytest", "-q", "--tb=native"]
    command += ["-p", "no:cacheprovider", *(x for p in plugins for x in ("-p", p))]
    command += ["-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["--continue-on-collection-errors", f"--timeout={TEST_TIMEOUT_S}"]
    command += [f"--outcomes={result}", f"--junitxml={result.with_suffix('.xml')}"]
    command += ["--pressed"] * (args.mode == "pressed")
    command += selection(args.suite, tree)
    code = subprocess.run(command, cwd=tree, env=environment(out, tree)).returncode
    if code not in (0, 1) or not result.is_file():
        raise SystemExit(
            f"pytest ended with code {code} before all tests were run; its output "
            "above says why."
        )
    return result


def baseline(args: argparse.Namespace) -> Path:
    return HERE / "baseline" / f"{args.tag}-{args.suite}.txt"


def check(args: argparse.Namespace, result: Path) -> int:
    """Compare with the committed baseline; 0 if only listed tests differ."""
    differs = [f"--differs={HERE / name}" for name in DIFFERS[args.mode]]
    return compare.main([str(baseline(args)), str(result), *differs])


def rebase(args: argparse.Namespace, result: Path) -> None:
    """Make the outcomes of an unpatched build the committed baseline."""
    path = baseline(args)
    header = [
        f"Upstream's tests on an unpatched CPU build of vLLM {args.tag}, made with",
        f"  python -m tests.upstream.run --tag {args.tag} --suite {args.suite} \\",
        "      --mode off --rebase --python PYTHON --sdist SDIST --out DIR",
    ]
    save_baseline(path, load(result), header)
    print(f"baseline: {path}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.run")
    parser.add_argument("--tag", required=True, help="upstream release, as v0.32.0")
    parser.add_argument(
        "--python", type=Path, required=True, help="Python of the build under test"
    )
    parser.add_argument(
        "--sdist", type=Path, required=True, help="upstream's sdist: tree or tarball"
    )
    parser.add_argument("--suite", choices=SUITES, default="core")
    parser.add_argument(
        "--mode",
        choices=DIFFERS,
        default="off",
        help="off: the build as it is; swapped: every prefix-caching BlockPool "
        "becomes a TieredBlockPool; pressed: and lookups find evictable blocks on "
        "the host only",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with baseline/ and fail on a difference that is not listed",
    )
    parser.add_argument(
        "--rebase",
        action="store_true",
        help="write this run of an unpatched build to baseline/",
    )
    args = parser.parse_args(argv)
    if args.mode == "pressed" and args.suite != "core":
        parser.error(
            f"--mode pressed is for --suite core, not {args.suite}: that has tests "
            "of other offloaders, which keep BlockPools of their own on the host and "
            "cannot be combined with the tier. Use --mode swapped."
        )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # Not resolve(): a venv's python is a link to one that has no vLLM.
    build = Build.probe(args.python.absolute(), args.tag)
    if args.mode != "off" and not build.patched:
        raise SystemExit(
            f"--mode {args.mode} needs the patched build, but {build.package} has no "
            "v1/kv_tier. Give the Python of a patched build, or --mode off."
        )
    if args.rebase and (build.patched or args.mode != "off"):
        raise SystemExit(
            "--rebase takes an unpatched build and --mode off: a baseline made from "
            "the patched build would agree with it whatever it does."
        )
    started = time.monotonic()
    out = args.out.absolute()
    tree = out / f"tree-{args.tag}-{args.mode}"
    extract_tests(args.sdist, tree)
    # Runs in other modes need the same, and may begin meanwhile.
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tools = out / "tools"
        make_tools(build.python, build.python_version, build.torch_version, tools)
        make_hub(build, out, tree)
    result = run_pytest(build, args, out, tree)
    if args.rebase:
        rebase(args, result)
    print(f"{result}: {counts(load(result))} in {time.monotonic() - started:.0f} s")
    return check(args, result) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
