# SPDX-License-Identifier: Apache-2.0
"""Where things are, and what `upstream.toml` pins for a tag."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]


class ToolError(Exception):
    """Something the user can change; shown as one message, without a traceback."""


def say(text: str) -> None:
    print(text, flush=True)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns, or with 1 and a message."""
    try:
        sys.exit(main())
    except ToolError as error:
        say(f"error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass(frozen=True)
class Layout:
    """The folders of a checkout. Tests point them at a folder of their own."""

    root: Path
    cache: Path

    @classmethod
    def default(cls) -> Layout:
        root = Path(os.environ.get("KV_TIER_ROOT") or Path(__file__).parents[2])
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(root.resolve(), Path(base) / "vllm-kv-tier")

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def quiltrc(self) -> Path:
        return self.patches / "quiltrc"

    @property
    def overlay(self) -> Path:
        return self.root / "vllm_overlay"

    @property
    def build(self) -> Path:
        return self.root / "build"

    def series(self, tag: str) -> Path:
        return self.patches / tag / "series"

    def tree(self, tag: str) -> Path:
        return self.build / tag / "src"

    def env(self, tag: str) -> Path:
        return self.build / "env" / tag

    @property
    def version(self) -> str:
        """The version of the tier, as `core.2`: the only place that has it.

        Raises:
            ToolError: the file VERSION is missing, or holds something else.
        """
        path = self.root / "VERSION"
        text = path.read_text().strip() if path.is_file() else ""
        if not re.fullmatch(r"core\.\d+", text):
            raise ToolError(f"{path} must hold the version, as core.2, not {text!r}")
        return text

    def tags(self) -> list[str]:
        found = [p.parent.name for p in self.patches.glob("*/upstream.toml")]
        return sorted(found, key=version_key)

    def newest_tags(self) -> list[str]:
        """The releases that are tested when none is named."""
        return self.tags()[-2:]


def version_key(tag: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", tag)]


def check_tag_name(tag: str) -> None:
    """Raise a ToolError for what is no name of a release, as `0.33.0` or `latest`."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+(\.\d+|\.post\d+)?", tag):
        wish = re.fullmatch(r"v?(\d+(\.\d+)+)", tag)
        advice = f"; write TAG=v{wish[1]}" if wish and tag[0] != "v" else ""
        raise ToolError(f"TAG={tag!r} is no release of upstream, as v0.33.0 is{advice}")


@dataclass(frozen=True)
class Pin:
    """One file of the package index, by name and content."""

    file: str
    sha256: str

    @property
    def project(self) -> str:
        """The project that the index files it under (PEP 503)."""
        stem = re.split(r"-\d", self.file, maxsplit=1)[0]
        return re.sub(r"[-_.]+", "-", stem).lower()


@dataclass(frozen=True)
class CpuPins:
    """The CPU build that a tag is tested with; see `patches/*/upstream.toml`.

    wheels: by architecture, and where a wheel is for one Python only, by both
    (`x86_64-cp311`). extensions_only: the wheel gives its compiled files only, the
    Python tree is the sdist's. optional: requirements that move to the extra `media`.
    also: requirements of an environment in addition to the wheel's. weak: versions of
    symbols that the compiled files ask for and older machines lack.
    """

    torch: str
    requires_python: str
    wheels: dict[str, Pin]
    extensions_only: bool = False
    optional: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    # Not in `repr`, from which environments know whether they are up to date: those of
    # releases without it stay.
    weak: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Pins:
    """`upstream.toml` of a tag. local_version: the tier's, the same for all tags."""

    tag: str
    version: str
    local_version: str
    torch: str
    requires_python: str
    sdist: Pin
    cuda: dict[str, Pin] = field(default_factory=dict)
    cpu: CpuPins | None = None

    def wheel_version(self, device: str) -> str:
        local = self.local_version
        if device == "cpu":
            # "cpu" is how vLLM knows the platform; "test" keeps users away.
            local += ".cputest" if self.require_cpu().extensions_only else ".cpu"
        return f"{self.version}+{local}"

    def require_cpu(self) -> CpuPins:
        if self.cpu is None:
            raise ToolError(
                f"patches/{self.tag}/upstream.toml has no [cpu] section, so there is "
                "no CPU build for this tag; use DEVICE=cuda or another TAG"
            )
        return self.cpu

    def base_wheel(self, device: str, arch: str, python: str | None = None) -> Pin:
        """The pinned wheel; python is `cp311` and the like, by default the own one."""
        if device not in ("cuda", "cpu"):
            raise ToolError(f"DEVICE={device} is not known; use DEVICE=cuda or cpu")
        wheels = self.require_cpu().wheels if device == "cpu" else self.cuda
        for key in (f"{arch}-{python or host_python()}", arch):
            if key in wheels:
                return wheels[key]
        raise ToolError(
            f"no {device} wheel is pinned for ARCH={arch} and this Python in "
            f"patches/{self.tag}/upstream.toml; pinned: {sorted(wheels)}"
        )


def host_arch() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(
        platform.machine(), platform.machine()
    )


def host_python() -> str:
    return "cp{}{}".format(*sys.version_info)


def _pins_by_arch(section: dict[str, Any]) -> dict[str, Pin]:
    return {k: Pin(**v) for k, v in section.items() if isinstance(v, dict)}


def load_pins(layout: Layout, tag: str) -> Pins:
    """Read `patches/<tag>/upstream.toml`.

    Raises:
        ToolError: the tag is not kept here, or a key is missing or unknown.
    """
    path = layout.patches / tag / "upstream.toml"
    if not path.is_file():
        raise ToolError(
            f"TAG={tag} is not kept here (no patches/{tag}/upstream.toml); "
            f"tags: {' '.join(layout.tags()) or 'none'}; `make new-tag` adds one"
        )
    try:
        data = tomllib.loads(path.read_text())
        cpu = None
        if section := data.pop("cpu", None):
            plain = {k: v for k, v in section.items() if not isinstance(v, dict)}
            for key in ("optional", "also", "weak"):
                plain[key] = tuple(plain.get(key, ()))
            cpu = CpuPins(**plain, wheels=_pins_by_arch(section))
        return Pins(
            local_version=layout.version,
            sdist=Pin(**data.pop("sdist")),
            cuda=_pins_by_arch(data.pop("cuda", {})),
            cpu=cpu,
            **data,
        )
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ToolError(f"patches/{tag}/upstream.toml: {error}") from error


@dataclass(frozen=True)
class Patch:
    """A patch file: its DEP-3 header, and the files that it changes."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def header(self) -> str:
        return re.split(r"(?m)^(?:---|Index:|diff )", self.text, maxsplit=1)[0]

    @property
    def files(self) -> list[str]:
        """Paths relative to the tree; `a/` and `b/` are stripped."""
        found = re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", self.text, re.M)
        return list(dict.fromkeys(found))


def read_series(layout: Layout, tag: str) -> list[Patch]:
    """The patches of a tag, in order. A file that is missing is an error."""
    path = layout.series(tag)
    if not path.is_file():
        raise ToolError(f"patches/{tag}/series is missing; every tag needs one")
    patches = []
    for line in path.read_text().splitlines():
        name = line.split("#")[0].strip()
        if not name:
            continue
        if not (path.parent / name).is_file():
            raise ToolError(
                f"patches/{tag}/series names {name}, which is not in patches/{tag}/"
            )
        patches.append(Patch(path.parent / name))
    return patches


def overlay_files(layout: Layout) -> dict[str, Path]:
    """Path in the tree to source file, for every file of the overlay."""
    return {
        p.relative_to(layout.overlay).as_posix(): p
        for p in sorted(layout.overlay.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"
    }
