# SPDX-License-Identifier: Apache-2.0
"""How an object lies in a store: a header that says all that it is, then the row.

The header has, in this order: a magic with the format's version, the checksum's
algorithm and value, a digest of the namespace and rank, the row's length, the key's
length, the key, and zeros up to a multiple of 64 bytes, so that the row is aligned. A
reader knows all of it but the checksum, and compares every byte.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

FORMAT_VERSION = 1

_MAGIC = b"KVTIER" + FORMAT_VERSION.to_bytes(2, "big")
_FIXED = struct.Struct("<8s8s16s16sQQ")
_ALIGNMENT = 64
_CHECKSUM_BYTES = 16
PIECE_BYTES = 1 << 20


class Checksum(Protocol):
    """Of bytes that come piece by piece."""

    def update(self, piece: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


CHECKSUMS: dict[bytes, Callable[[], Checksum]] = {b"blake3": blake3}
"""At least 128 bit each, of which 128 are kept, by the names that headers have. New
objects have the last one."""
with contextlib.suppress(ImportError):
    # Five times as fast, but no dependency of vLLM.
    import xxhash

    CHECKSUMS[b"xxh3_128"] = xxhash.xxh3_128


class ObjectFormat:
    """Writes and reads the objects of one rank under one namespace.

    Args:
        namespace: What shaped the bytes.
        rank: Whose part they are.
        row_bytes: Size of each row.
        piece_bytes: Of a row, read from a file and checked before the next: what a
            core's cache still has is checked in less time, and smaller pieces cost
            more in calls than they save.

    """

    def __init__(
        self,
        namespace: str,
        rank: int,
        row_bytes: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        name = f"{namespace}/r{rank}".encode()
        self._namespace = hashlib.blake2b(name, digest_size=16).digest()
        self._row_bytes = row_bytes
        self._piece_bytes = piece_bytes

    def size(self, key: bytes) -> int:
        """Bytes of an object."""
        return self.header_bytes(key) + self._row_bytes

    @staticmethod
    def header_bytes(key: bytes) -> int:
        return -(-(_FIXED.size + len(key)) // _ALIGNMENT) * _ALIGNMENT

    def header(self, key: bytes, row: memoryview) -> bytes:
        """What an object begins with."""
        algorithm, begin = list(CHECKSUMS.items())[-1]
        checksum = begin()
        checksum.update(row)
        return self._header(key, algorithm, checksum)

    def is_right(self, header: bytes | bytearray, key: bytes, row: memoryview) -> bool:
        """Whether these are header and row of the object of this key, undamaged."""
        algorithm, checksum = _checksum_of(header)
        if checksum is None or len(row) != self._row_bytes:
            return False
        checksum.update(row)
        return header == self._header(key, algorithm, checksum)

    def write(self, fd: int, key: bytes, row: memoryview) -> None:
        """Write an object to an empty file.

        Raises:
            OSError: Also where the system takes less than all.

        """
        header = self.header(key, row)
        written = os.writev(fd, [header, row])
        if written != self.size(key):
            # The rest says why: the disk is full, or the error comes now.
            self._write_rest(fd, memoryview(header + bytes(row))[written:])

    def read(self, fd: int, key: bytes, row: memoryview) -> bool:
        """Read an object of a file into `row`. True if it is this one and undamaged.

        Raises:
            OSError: It could not be read.

        """
        header = bytearray(self.header_bytes(key))
        size = self._piece_bytes
        piece = row[:size]
        if os.preadv(fd, [header, piece], 0) != len(header) + len(piece):
            return False
        algorithm, checksum = _checksum_of(header)
        if checksum is None or len(row) != self._row_bytes:
            return False
        checksum.update(piece)
        for begin in range(size, len(row), size):
            piece = row[begin : begin + size]
            if os.preadv(fd, [piece], len(header) + begin) != len(piece):
                return False
            checksum.update(piece)
        return header == self._header(key, algorithm, checksum)

    def _header(self, key: bytes, algorithm: bytes, checksum: Checksum) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC,
            algorithm,
            checksum.digest()[:_CHECKSUM_BYTES],
            self._namespace,
            self._row_bytes,
            len(key),
        )
        return (fixed + key).ljust(self.header_bytes(key), b"\0")

    @staticmethod
    def _write_rest(fd: int, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(fd, rest) :]


def _checksum_of(header: bytes | bytearray) -> tuple[bytes, Checksum | None]:
    """The algorithm that a header names, and one of it; none where nobody knows it."""
    algorithm = _FIXED.unpack_from(header)[1].rstrip(b"\0")
    begin = CHECKSUMS.get(algorithm)
    return algorithm, begin() if begin is not None else None
