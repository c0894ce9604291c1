# SPDX-License-Identifier: Apache-2.0
"""The format of an object in a store: a header that identifies it, then the row.

The header has, in this order: a magic with the format's version, the checksum's
algorithm and value, a digest of namespace and rank, the row's length, the key's length,
the key, and zeros up to a multiple of 64 bytes, to align the row. A reader knows all of
it but the checksum, and compares every byte: an object of another length is not its
own.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable

from blake3 import blake3

FORMAT_VERSION = 2

_MAGIC = b"KVTIER" + FORMAT_VERSION.to_bytes(2, "big")
_FIXED = struct.Struct("<8s8s16s16sQQ")
_ALIGNMENT = 64
_FAST = b"xxh3_128"


def _blake3(row: memoryview) -> bytes:
    return blake3(row).digest(16)


CHECKSUMS: dict[bytes, Callable[[memoryview], bytes]] = {b"blake3": _blake3}
"""128-bit checksums by their names in headers. New objects use the last one."""
with contextlib.suppress(ImportError):
    # Much faster, but not a dependency of vLLM.
    import xxhash

    CHECKSUMS[_FAST] = xxhash.xxh3_128_digest


def advice() -> str | None:
    """How to make checksums faster; None if they are fast."""
    if _FAST in CHECKSUMS:
        return None
    return (
        "the package xxhash is not installed. Without it checksums are slow, and "
        "objects of engines that have it cannot be read. Install it (pip install "
        "xxhash) for all engines that share a store."
    )


class ObjectFormat:
    """Writes and reads the objects of one rank in one namespace.

    Args:
        namespace: Digest of everything that shapes the bytes.
        rank: Number of the rank.

    """

    def __init__(self, namespace: str, rank: int) -> None:
        name = f"{namespace}/r{rank}".encode()
        self._namespace = hashlib.blake2b(name, digest_size=16).digest()

    def size(self, key: bytes, row_bytes: int) -> int:
        """Bytes of an object with a row of `row_bytes`, header included."""
        return self.header_bytes(key) + row_bytes

    @staticmethod
    def header_bytes(key: bytes) -> int:
        return -(-(_FIXED.size + len(key)) // _ALIGNMENT) * _ALIGNMENT

    def header(self, key: bytes, row: memoryview) -> bytes:
        """The header of an object."""
        algorithm, checksum = list(CHECKSUMS.items())[-1]
        return self._header(key, algorithm, checksum(row), len(row))

    def is_right(
        self, header: bytes | bytearray, key: bytes, row: memoryview
    ) -> bool | None:
        """Whether header and row are those of the object of this key, undamaged.

        None if that is unknown because the checksum needs a package that is missing.
        """
        algorithm, theirs = _FIXED.unpack_from(header)[1:3]
        algorithm = algorithm.rstrip(b"\0")
        checksum = CHECKSUMS.get(algorithm)
        if checksum is not None:
            return header == self._header(key, algorithm, checksum(row), len(row))
        expected = self._header(key, _FAST, theirs, len(row))
        return None if algorithm == _FAST and header == expected else False

    def write(self, fd: int, key: bytes, row: memoryview) -> None:
        """Write an object to an empty file.

        Raises:
            OSError: The write failed, or the file system did not take all bytes.

        """
        header = self.header(key, row)
        written = os.writev(fd, [header, row])
        if written != self.size(key, len(row)):
            # Writing the rest either succeeds or raises the reason.
            self._write_rest(fd, memoryview(header + bytes(row))[written:])

    def read(self, fd: int, key: bytes, row: memoryview) -> bool | None:
        """Read an object into `row`, and check it as `is_right` does.

        Raises:
            OSError: It could not be read.

        """
        header = bytearray(self.header_bytes(key))
        if os.preadv(fd, [header, row], 0) != self.size(key, len(row)):
            return False
        return self.is_right(header, key, row)

    def _header(
        self, key: bytes, algorithm: bytes, checksum: bytes, row_bytes: int
    ) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC, algorithm, checksum, self._namespace, row_bytes, len(key)
        )
        return (fixed + key).ljust(self.header_bytes(key), b"\0")

    @staticmethod
    def _write_rest(fd: int, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(fd, rest) :]
