# SPDX-License-Identifier: Apache-2.0
"""Uses kvcached: its library to map device memory at fixed addresses, and its tools.

`kvctl` and `kvtop` set limits and show use through a segment of shared memory. Nothing
else of kvcached is used, since its integration replaces upstream's block pool.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

# The driver takes as long for a page of 2 MiB as for one of 16 MiB (60 to 100 us,
# H100), but a page with two users is freed only when both are gone.
_LEAST_PAGE, _LARGEST_PAGE = 2 << 20, 16 << 20

# Least number of driver pages in each layer. A page of blocks takes two of them, so it
# is at most a thirty-second of the KV cache.
_PAGES_OF_A_LAYER = 64

# kvcached numbers its allocators. The first one is made at initialization.
_GROUP = 0

_is_taken = False


class KvcachedMemory:
    """A range of device addresses in which pages get and lose memory.

    Reading a page without memory gives undefined values, and writes to it are lost;
    neither is an error.

    Args:
        num_bytes: Size of the range. No page of it has memory at first.
        num_layers: Number of layers in it, one after the other.
        device: The GPU.

    Raises:
        ValueError: kvcached cannot be used. The message has the fix.

    """

    def __init__(self, num_bytes: int, num_layers: int, device: torch.device) -> None:
        global _is_taken
        if _is_taken:
            raise ValueError(
                "--kv-offloading-config: shrink_after_s is for one engine of a "
                "process, and this process has had one. Start another process, or "
                "remove shrink_after_s."
            )
        self._vmm = _load()
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        self._device = device
        _is_taken = True
        self.page_bytes = size = page_bytes(num_bytes // max(1, num_layers))
        self._vmm.init_kvcached(str(device), size, False)
        whole = -(-num_bytes // size) * size
        # One range of bytes, instead of keys and values of several layers.
        (memory,) = self._vmm.create_kv_tensors(
            whole, 1, str(device), 1, 1, _GROUP, True
        )
        self.memory: torch.Tensor = memory
        """`[num_bytes]`, rounded up to whole pages, int8."""
        self._stream = torch.cuda.Stream(device, priority=-1)
        # Without this, memory is freed page by page when the process ends. The driver
        # is gone by then, and each page logs an error.
        self._lock = threading.Lock()
        Finalize(self, _shut_down, (self._vmm, device, self._lock), exitpriority=10)

    def map(self, pages: Sequence[int]) -> bool:
        """Give pages zeroed memory: all of them, or none if there is too little.

        Args:
            pages: Numbers of pages in the range, without memory.

        Returns:
            Whether the pages have memory now.

        """
        torch.cuda.set_device(self._device)
        mapped: list[int] = []
        with self._lock:
            try:
                # One by one, since the library leaves mapped what it mapped before it
                # runs out of memory.
                for offset in self._offsets(pages):
                    self._vmm.map_to_kv_tensors([offset], _GROUP)
                    mapped.append(offset)
                self._clear(pages)
                return True
            except RuntimeError as e:
                logger.debug("KV tier: no device memory now: %s", e)
                self._vmm.unmap_from_kv_tensors(mapped, _GROUP)
                return False

    def _clear(self, pages: Sequence[int]) -> None:
        """Fill new pages with zeros.

        Other processes' data may contain NaNs, which spoil attention even where masked.
        """
        size = self.page_bytes
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for first, end in _runs(pages):
                self.memory[first * size : end * size].zero_()
            self._stream.synchronize()

    def unmap(self, pages: Sequence[int]) -> None:
        """Release the memory of pages.

        Raises:
            RuntimeError: The driver did not release it.

        """
        torch.cuda.set_device(self._device)
        with self._lock:
            self._vmm.unmap_from_kv_tensors(self._offsets(pages), _GROUP)

    def _offsets(self, pages: Iterable[int]) -> list[int]:
        return [page * self.page_bytes for page in pages]

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU's memory."""
        return torch.cuda.mem_get_info(self._device)


class SharedLimit:
    """Limit and use of this engine's KV memory, for `kvctl` and `kvtop`.

    Args:
        num_bytes: Initial limit.

    """

    def __init__(self, num_bytes: int) -> None:
        from kvcached.cli import utils
        from kvcached.utils import DEFAULT_IPC_NAME

        self._utils = utils
        self.name: str = DEFAULT_IPC_NAME
        utils.init_kv_cache_limit(self.name, num_bytes)
        # An engine's processes do not run `atexit` handlers.
        Finalize(self, utils.delete_kv_cache_segment, (self.name,), exitpriority=0)

    def limit_bytes(self) -> int | None:
        """The current limit; None if the segment is gone."""
        try:
            info = self._utils.get_kv_cache_limit(self.name)
        except (OSError, ValueError):
            # Another process is replacing the segment.
            return None
        return None if info is None else info.total_size

    def report_use(self, used: int, ahead: int) -> None:
        """Publish how much is mapped.

        Args:
            used: Bytes in use.
            ahead: Bytes that are mapped but not yet in use.

        """
        shm, struct = self._utils.RwLockedShm, self._utils.MemInfoStruct
        try:
            # kvcached's write lock would create the missing segment again.
            if self.limit_bytes() is None:
                return
            with shm(self.name, struct.SHM_SIZE, shm.WLOCK) as buffer:
                info = struct.from_buffer(buffer)
                info.used_size, info.prealloc_size = used, ahead
                info.write_to_buffer(buffer)
        except (OSError, ValueError) as e:
            logger.warning_once("KV tier: kvtop cannot show this engine: %s", e)


def _shut_down(vmm: Any, device: torch.device, lock: threading.Lock) -> None:
    # Never released: a thread that maps pages must wait until the process ends.
    lock.acquire()
    torch.cuda.synchronize(device)
    vmm.shutdown_kvcached()


def shared_limit(num_bytes: int) -> SharedLimit | None:
    """A `SharedLimit`, or None if the segment cannot be made."""
    try:
        return SharedLimit(num_bytes)
    except (ImportError, OSError) as e:
        logger.warning("KV tier: kvctl cannot limit this engine's KV memory: %s", e)
        return None


def _load() -> Any:
    try:
        from kvcached import vmm_ops
    except (ImportError, OSError, RuntimeError) as e:
        raise ValueError(
            "--kv-offloading-config: shrink_after_s needs kvcached on a GPU, which "
            f"cannot be loaded: {e}. Install one that was built for this torch (pip "
            "install kvcached --no-build-isolation), or remove shrink_after_s."
        ) from e
    return vmm_ops


def page_bytes(layer_bytes: int) -> int:
    """Bytes of the driver pages behind a KV cache.

    Args:
        layer_bytes: Bytes of each layer.

    """
    size = _LARGEST_PAGE
    while size > _LEAST_PAGE and size * _PAGES_OF_A_LAYER > layer_bytes:
        size //= 2
    return size


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in ascending `pages`, as (first, end)."""
    first = end = -1
    for page in pages:
        if page != end:
            if end > first:
                yield first, end
            first = page
        end = page + 1
    if end > first:
        yield first, end
