# SPDX-License-Identifier: Apache-2.0
"""A zip writer whose output depends on nothing but its input.

`zipfile` can neither copy a compressed member as it is, which saves minutes on a CUDA
wheel, nor promise the same deflate bytes with every zlib. Here members of the source
are copied verbatim and new members are stored without compression.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from .config import ToolError

# Layouts: the ZIP application note, sections 4.3.7, 4.3.12 and 4.3.16.
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
DATE_1980_01_01 = 0x21
VERSION = 20
UNIX_20 = 3 << 8 | VERSION
UTF8 = 0x800
LIMIT = 0xFFFFFFFF
CHUNK = 1 << 20


class WheelZip:
    """Writes members in the order of the calls, all of 1980-01-01 00:00."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._central: list[bytes] = []
        self._offset = 0

    def __enter__(self) -> WheelZip:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._offset += len(data)

    def _header(
        self, name: str, mode: int, method: int, crc: int, packed: int, size: int
    ) -> None:
        if max(packed, size, self._offset) >= LIMIT:
            raise ToolError(f"{name}: members and wheels of 4 GiB are not supported")
        raw = name.encode()
        common = (UTF8, method, 0, DATE_1980_01_01, crc, packed, size, len(raw), 0)
        self._central.append(
            CENTRAL.pack(
                b"PK\1\2", UNIX_20, VERSION, *common, 0, 0, 0, mode << 16, self._offset
            )
            + raw
        )
        self._write(LOCAL.pack(b"PK\3\4", VERSION, *common) + raw)

    def add(self, name: str, data: bytes, mode: int = 0o100644) -> None:
        crc = zlib.crc32(data)
        self._header(name, mode, zipfile.ZIP_STORED, crc, len(data), len(data))
        self._write(data)

    def copy(
        self, name: str, source: BinaryIO, info: zipfile.ZipInfo, mode: int
    ) -> None:
        """Copy a member of another zip without unpacking it."""
        source.seek(info.header_offset)
        fields = LOCAL.unpack(source.read(LOCAL.size))
        source.seek(fields[-2] + fields[-1], 1)  # its name and extra field
        packed = info.compress_size
        self._header(name, mode, info.compress_type, info.CRC, packed, info.file_size)
        while packed:
            chunk = source.read(min(CHUNK, packed))
            if not chunk:
                raise ToolError(f"{info.filename} is cut short in the source wheel")
            self._write(chunk)
            packed -= len(chunk)

    def _finish(self) -> None:
        start, count = self._offset, len(self._central)
        if count > 0xFFFF or start >= LIMIT:
            raise ToolError("the wheel is too large for a zip without ZIP64")
        for entry in self._central:
            self._write(entry)
        size = self._offset - start
        self._write(END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0))
