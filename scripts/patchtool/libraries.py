# SPDX-License-Identifier: Apache-2.0
"""Lets compiled files run on a machine that lacks libraries which they ask for.

Where the package index has a torch for CUDA only, the libraries of NVIDIA that it needs
are several GB of no use on a CPU. A stand-in has the symbols that torch's own libraries
ask for, in the versions that they ask for; every call answers "no device".

Where the C++ runtime is older than the one that a library was built with, the loader
refuses it for versions of symbols that nothing calls. A weak need is a wish.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from .config import ToolError, say

# Requirements of torch that are not installed then.
REPLACED = [
    "cuda-bindings",
    "cuda-toolkit",
    "triton",
    *(f"nvidia-{name}-cu13" for name in ("cudnn", "cusparselt", "nccl", "nvshmem")),
    *(
        f"nvidia-{name}-cu12"
        for name in (
            *("cublas", "cuda-cupti", "cuda-nvrtc", "cuda-runtime", "cudnn", "cufft"),
            *("cufile", "curand", "cusolver", "cusparse", "cusparselt", "nccl"),
            *("nvjitlink", "nvshmem", "nvtx"),
        )
    ),
]

NO_DEVICE = 100  # cudaErrorNoDevice
# The driver is never asked for: torch looks for it at run time.
_NVIDIA = re.compile(r"lib(cu|nccl|nvshmem|nv)(?!da\.so\.1)")
# Symbols without a version, by the library that has them; first match wins.
_OWNER = [
    *(("cuFile", "libcufile"), ("cusparseLt", "libcusparseLt"), ("cupti", "libcupti")),
    *(("curand", "libcurand"), ("nccl", "libnccl"), ("nvshmem", "libnvshmem")),
    *(("cudnn", "libcudnn"), ("cusolver", "libcusolver"), ("cublasLt", "libcublasLt")),
    *(("cublas", "libcublas"), ("cufft", "libcufft"), ("cusparse", "libcusparse")),
    *(("nvrtc", "libnvrtc"), ("nv", "libnv"), ("cu", "libcudart")),
]


def _output(*command: str | Path) -> str:
    try:
        result = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise ToolError(
            f"{command[0]} is not installed; install binutils and gcc, or set "
            "KV_TIER_NVIDIA=1 to install NVIDIA's libraries"
        ) from error
    return result.stdout


def _needed(libraries: list[Path]) -> dict[str, dict[str, str]]:
    """By NVIDIA library: the symbols that are asked for, and their versions."""
    present = {path.name for path in libraries}
    asked: dict[str, dict[str, str]] = {}
    for path in libraries:
        dynamic = _output("readelf", "-d", path)
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic):
            if _NVIDIA.match(name) and name not in present:
                asked.setdefault(name, {})

    defined: set[str] = set()
    library_of: dict[str, str] = {}
    for path in libraries:
        symbols = _output("nm", "-D", "--defined-only", path).splitlines()
        defined |= {line.split()[-1].split("@")[0] for line in symbols if line}
        current = ""
        for line in _output("readelf", "-V", path).splitlines():
            if match := re.search(r"File: (\S+)", line):
                current = match[1]
            elif current and (match := re.search(r"Name: (\S+)  Flags", line)):
                library_of[match[1]] = current

    for path in libraries:
        for line in _output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            version = version.strip("@")
            if (name := library_of.get(version, "")) in asked:
                asked[name][symbol] = version
            elif not version and symbol not in defined:
                owner = _owner(symbol, asked)
                if owner:
                    asked[owner].setdefault(symbol, "")
    return asked


def _owner(symbol: str, libraries: dict[str, dict[str, str]]) -> str | None:
    for prefix, library in _OWNER:
        if re.match(f"_*{prefix}", symbol):
            names = [n for n in libraries if re.match(rf"{library}(_\w+)?\.so", n)]
            return names[0] if names else None
    return None


def _build(path: Path, symbols: dict[str, str]) -> None:
    """Compile a library `path` that has `symbols`."""
    lines = [f"int kv_tier_no_device(void) {{ return {NO_DEVICE}; }}"]
    alias = '__attribute__((alias("kv_tier_no_device")))'
    lines += [f"int {symbol}(void) {alias};" for symbol in symbols]
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol, version in symbols.items():
        versions[version].append(symbol)
    script = [
        f"{version} {{ global: {' '.join(f'{s};' for s in found)} }};"
        for version, found in versions.items()
        if version
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, table = Path(folder, "stub.c"), Path(folder, "versions")
        source.write_text("\n".join(lines))
        command = ["gcc", "-shared", "-fPIC", "-w", "-nostdlib", "-fno-builtin"]
        command += [str(source), "-o", str(path), f"-Wl,-soname,{path.name}"]
        if script:
            table.write_text("\n".join(script))
            command.append(f"-Wl,--version-script={table}")
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ToolError("gcc is not installed; install it") from error
    if result.returncode:
        raise ToolError(f"cannot compile {path.name}:\n{result.stderr[-2000:]}")


def write_stubs(folder: Path) -> list[str]:
    """Put stand-ins next to torch's libraries in `folder`. Returns their names.

    Raises:
        ToolError: binutils or gcc are missing.
    """
    libraries = sorted(p for p in folder.glob("*.so*") if p.is_file())
    needed = _needed(libraries)
    for name, symbols in needed.items():
        _build(folder / name, symbols)
    if needed:
        say(f"{len(needed)} libraries of NVIDIA replaced by stand-ins")
    return sorted(needed)


_VERSION_NEEDS = 0x6FFFFFFE  # SHT_GNU_verneed
_WEAK = 2  # VER_FLG_WEAK
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NEED = struct.Struct("<HHIII")  # version, count, file, first entry, next need
_ENTRY = struct.Struct("<IHHII")  # hash, flags, index, name, next entry


def _entries(data: bytes) -> Iterator[tuple[int, str]]:
    """Offset and version of every need, of a 64-bit little-endian library."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
    for section in sections:
        if section[1] != _VERSION_NEEDS:
            continue
        need, names, num_needs = section[4], sections[section[6]][4], section[7]
        for _ in range(num_needs):
            _, num_entries, _, first, next_need = _NEED.unpack_from(data, need)
            entry = need + first
            for _ in range(num_entries):
                _, _, _, name, next_entry = _ENTRY.unpack_from(data, entry)
                start = names + name
                yield entry, data[start : data.index(b"\0", start)].decode()
                entry += next_entry
            need += next_need


def weaken(library: Path, versions: Collection[str]) -> int:
    """Mark what `library` needs of `versions` as weak; how many needs these were."""
    data = bytearray(library.read_bytes())
    found = [offset for offset, version in _entries(bytes(data)) if version in versions]
    for offset in found:
        fields = list(_ENTRY.unpack_from(data, offset))
        fields[1] |= _WEAK
        _ENTRY.pack_into(data, offset, *fields)
    if found:
        # Never through a hard link into a cache.
        partial = library.with_name(f"{library.name}.partial")
        partial.write_bytes(data)
        partial.chmod(0o755)
        os.replace(partial, library)
    return len(found)
