# SPDX-License-Identifier: Apache-2.0
"""Functions of the CUDA driver that torch does not offer."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm.v1.kv_tier.copying.engine import CopyEngineUnavailable


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


ACCESS_ORDER_STREAM = 1
OPERAND_IS_ADDRESS = 1

# `CUmemcpy3DOperand`. The fields left out are placement hints for managed memory.
_OPERAND = np.dtype(
    {
        "names": ["type", "address", "pitch", "rows"],
        "formats": ["i4", "u8", "u8", "u8"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 40,
    }
)

STRIDED_COPY = np.dtype(
    {
        "names": ["src", "dst", "width", "height", "depth", "access_order", "flags"],
        "formats": [_OPERAND, _OPERAND, "u8", "u8", "u8", "i4", "u4"],
        "offsets": [0, 40, 80, 88, 96, 104, 108],
        "itemsize": 112,
    }
)
"""`CUDA_MEMCPY3D_BATCH_OP`: `depth` layers of `height` rows of `width` bytes.

In each operand, rows lie `pitch` bytes apart, and layers `rows` times as much.
"""


class CudaDriver:
    """Calls `libcuda` for one device.

    Args:
        device: A CUDA device.

    Raises:
        CopyEngineUnavailable: `libcuda` cannot be loaded.

    """

    def __init__(self, device: torch.device) -> None:
        try:
            # CDLL releases the GIL: a call blocks for as long as the device's queue is
            # full.
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise CopyEngineUnavailable(f"The CUDA driver cannot be loaded: {e}") from e
        self._attributes = _Attributes(src_access_order=ACCESS_ORDER_STREAM)
        self._attributes_start = ctypes.c_size_t(0)
        self._one_attribute = (
            ctypes.byref(self._attributes),
            ctypes.byref(self._attributes_start),
            1,
        )
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy_batch, self._copy_batch_failed = self._batch_function(
            "cuMemcpyBatchAsync",
            [address, address, address, size, address, address, size],
            [address],
        )
        self._copy_strided, self._copy_strided_failed = self._batch_function(
            "cuMemcpy3DBatchAsync", [size, address], [ctypes.c_ulonglong, address]
        )
        # The driver identifies a device by the context of the calling thread. A thread
        # that torch has not used has none.
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            code = self._lib.cuCtxGetCurrent(ctypes.byref(self._context))
        self._check("cuCtxGetCurrent", code)

    def device_address(self, host_address: int) -> int:
        """The device's address of pinned host memory.

        Raises:
            RuntimeError: The device cannot address it.

        """
        self._enter()
        found = ctypes.c_void_p()
        code = self._lib.cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(host_address), ctypes.c_uint(0)
        )
        self._check("cuMemHostGetDevicePointer", code)
        return found.value or 0

    def has_batches(self) -> bool:
        """Whether `copy_batch` can be called."""
        return self._copy_batch is not None

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None:
        """Queue copies in one call. They may run in any order.

        Args:
            dst: Address of an array of `count` 64-bit target addresses. All three
                arrays are read before the call returns.
            src: Address of the array of source addresses.
            sizes: Address of the array of sizes in bytes.
            count: Number of copies.
            stream: Handle of a stream other than the default one.

        Raises:
            RuntimeError: The driver refused the copies.

        """
        self._enter()
        code = self._copy_batch(
            *(dst, src, sizes, count),
            *self._one_attribute,
            *self._copy_batch_failed,
            stream,
        )
        self._check("cuMemcpyBatchAsync", code)

    def has_strided_batches(self) -> bool:
        """Whether `copy_strided_batch` can be called."""
        return self._copy_strided is not None

    def copy_strided_batch(self, operations: int, count: int, stream: int) -> None:
        """Queue strided copies in one call. They may run in any order.

        Args:
            operations: Address of an array of `count` `STRIDED_COPY`. It is read before
                the call returns.
            count: Number of operations.
            stream: Handle of a stream other than the default one.

        Raises:
            RuntimeError: The driver refused the copies.

        """
        self._enter()
        code = self._copy_strided(
            count, operations, *self._copy_strided_failed, 0, stream
        )
        self._check("cuMemcpy3DBatchAsync", code)

    def _batch_function(
        self, name: str, before: Sequence[Any], after: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Look up a batch function.

        Returns:
            The function, or None if the driver lacks it, and the extra arguments that
            it takes between `before` and `after`.

        """
        # CUDA 13 dropped the argument for the index of the failed copy, and kept the
        # old form for programs built with 12.8.
        failed: tuple[Any, ...] = ()
        function = _function(self._lib, f"{name}_v2")
        if function is None:
            failed = (ctypes.byref(ctypes.c_size_t()),)
            function = _function(self._lib, name)
        if function is not None:
            # Set once, since the function is called for every few copies.
            function.argtypes = [*before, *len(failed) * [ctypes.c_void_p], *after]
        return function, failed

    def _enter(self) -> None:
        self._check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(self._context))

    def _check(self, function: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(name))
            text = (name.value or b"unknown error").decode()
            raise RuntimeError(f"{function} failed: {text} ({code}).")


def load_driver(device: torch.device) -> CudaDriver:
    """The driver of a device.

    Raises:
        CopyEngineUnavailable: The device is not a CUDA device, or has no driver.

    """
    if torch.version.hip:
        raise CopyEngineUnavailable("Batched copies are for CUDA, and this is ROCm.")
    return CudaDriver(device)


def too_old(function: str) -> CopyEngineUnavailable:
    """The error to raise where the driver lacks a function."""
    return CopyEngineUnavailable(
        f"The driver has no {function}. Update it to 570 (CUDA 12.8) or later."
    )


def current_stream(device: torch.device) -> int:
    """Handle of the device's current stream; 0 on a CPU, where tests keep regions."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device).cuda_stream


def _function(lib: ctypes.CDLL, name: str) -> Any | None:
    """A function of a library; None: it has none of that name."""
    try:
        return lib[name]
    except AttributeError:
        return None
