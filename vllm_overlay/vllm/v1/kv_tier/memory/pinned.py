# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory of an exact size that the GPU driver allocates.

Some drivers refuse to register existing memory, as in guests of confidential computing
(upstream issue 55428), but allocate pinned memory. Torch can allocate it too, but
rounds its size up to a power of two (upstream issue 53042).
"""

import ctypes
import weakref
from typing import Any

import torch


def allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned memory. It is freed with its last view.

    The calling thread must have a current device.

    Args:
        num_bytes: Size. All pages exist on return.

    Returns:
        `[num_bytes]`, uint8.

    Raises:
        OSError: There is no such driver, or it refused.

    """
    lib = _driver()
    context, address = ctypes.c_void_p(), ctypes.c_void_p()
    _check(lib, "cuCtxGetCurrent", ctypes.byref(context))
    size = ctypes.c_size_t(num_bytes)
    _check(lib, "cuMemHostAlloc", ctypes.byref(address), size, ctypes.c_uint(0))
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value or 0)
    # Not at exit: other threads may still read, and the memory goes with the process.
    weakref.finalize(memory, _free, lib, context, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(lib: Any, function: str, *args: Any) -> None:
    code = lib[function](*args)
    if code:
        raise OSError(f"{function} failed with error {code}")


def _free(lib: Any, context: ctypes.c_void_p, address: ctypes.c_void_p) -> None:
    # The thread that drops the last view may never have used a GPU.
    lib.cuCtxSetCurrent(context)
    lib.cuMemFreeHost(address)
