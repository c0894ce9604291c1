# SPDX-License-Identifier: Apache-2.0
"""Lets a library start where the C++ runtime is older than the one it was built with.

A library names the versions of symbols that it needs, and the loader refuses it when
one is missing, even if nothing calls them. A need that is marked weak is a wish.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

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
