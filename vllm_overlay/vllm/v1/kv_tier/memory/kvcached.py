# SPDX-License-Identifier: Apache-2.0
"""kvcached: its library for device memory behind fixed addresses, and the place in
shared memory where its tools set limits and look at use.

Nothing else of it is used: its integration replaces upstream's block pool.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

# The driver takes as long for a page of 2 MiB as for one of 16 (60 to 100 microseconds,
# H100); but what pages of two users meet in stays until both are gone.
_LEAST_PAGE, _LARGEST_PAGE = 2 << 20, 16 << 20

# At least so many pages of the driver lie in each layer. A page of blocks takes two of
# them, so it is a thirty-second of the KV cache at most.
_PAGES_OF_A_LAYER = 64

# Its allocators have numbers; it makes the first one when it is initialized.
_GROUP = 0

_is_taken = False


class KvcachedMemory:
    """A range of device addresses, of which pages have memory. What is read from the
    others is undefined, what is written to them is lost; neither is an error.

    Args:
        num_bytes: Of the range. No page of it has memory at first.
        num_layers: That lie in it one after the other.
        device: The GPU.

    Raises:
        ValueError: kvcached cannot be used. The message names the mend.

    """

    def __init__(self, num_bytes: int, num_layers: int, device: torch.device) -> None:
        global _is_taken
        if _is_taken:
            raise ValueError(
                "--kv-offloading-config: shrink_after_s is for one engine of a "
                "process, and this process has had one. Start another process, or "
                "remove it."
            )
        self._vmm = _load()
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        self._device = device
        _is_taken = True
        self.page_bytes = size = page_bytes(num_bytes // max(1, num_layers))
        self._vmm.init_kvcached(str(device), size, False)
        whole = -(-num_bytes // size) * size
        # Bytes of one range, not keys and values of layers.
        (memory,) = self._vmm.create_kv_tensors(
            whole, 1, str(device), 1, 1, _GROUP, True
        )
        self.memory: torch.Tensor = memory
        """`[num_bytes]` and the rest of the last page, int8."""
        self._stream = torch.cuda.Stream(device, priority=-1)
        # Else it is the end of the process that takes the memory back, page by page,
        # when the driver is gone already: with an error each.
        self._lock = threading.Lock()
        Finalize(self, _shut_down, (self._vmm, device, self._lock), exitpriority=10)

    def map(self, pages: Sequence[int]) -> bool:
        """Give pages that have none memory, all zero: all of them, or none where there
        is not enough.

        Args:
            pages: By their number in the range.

        Returns:
            Whether they have it.

        """
        torch.cuda.set_device(self._device)
        is_mapped = False
        with self._lock:
            try:
                is_mapped = self._vmm.map_to_kv_tensors(self._offsets(pages), _GROUP)
                if is_mapped:
                    self._clear(pages)
                return is_mapped
            except RuntimeError as e:
                logger.debug("KV tier: no device memory now: %s", e)
                if is_mapped:
                    self._vmm.unmap_from_kv_tensors(self._offsets(pages), _GROUP)
                return False

    def _clear(self, pages: Sequence[int]) -> None:
        """It was others' memory, and what is not a number spoils attention even where
        it is masked."""
        size = self.page_bytes
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for first, end in _runs(pages):
                self.memory[first * size : end * size].zero_()
            self._stream.synchronize()

    def unmap(self, pages: Sequence[int]) -> None:
        """Give the memory of pages back.

        Raises:
            RuntimeError: The driver did not take it.

        """
        torch.cuda.set_device(self._device)
        with self._lock:
            self._vmm.unmap_from_kv_tensors(self._offsets(pages), _GROUP)

    def _offsets(self, pages: Iterable[int]) -> list[int]:
        return [page * self.page_bytes for page in pages]

    def free_bytes(self) -> tuple[int, int]:
        """Free memory of the GPU, and all that it has."""
        return torch.cuda.mem_get_info(self._device)


class SharedLimit:
    """Limit and use of this engine's KV memory, for `kvctl` and `kvtop`.

    Args:
        num_bytes: The limit at first.

    """

    def __init__(self, num_bytes: int) -> None:
        from kvcached.cli import utils
        from kvcached.utils import DEFAULT_IPC_NAME

        self._utils = utils
        self.name: str = DEFAULT_IPC_NAME
        utils.init_kv_cache_limit(self.name, num_bytes)
        # Processes of an engine end without `atexit`.
        Finalize(self, utils.delete_kv_cache_segment, (self.name,), exitpriority=0)

    def limit_bytes(self) -> int | None:
        """What is set now; None if somebody has removed it."""
        try:
            info = self._utils.get_kv_cache_limit(self.name)
        except (OSError, ValueError):
            # Somebody is about to make it anew.
            return None
        return None if info is None else info.total_size

    def tell(self, used: int, ahead: int) -> None:
        """Say how much is mapped.

        Args:
            used: Bytes.
            ahead: Bytes that nobody has a use for yet.

        """
        shm, struct = self._utils.RwLockedShm, self._utils.MemInfoStruct
        try:
            # Its write lock would make the file anew.
            if self.limit_bytes() is None:
                return
            with shm(self.name, struct.SHM_SIZE, shm.WLOCK) as buffer:
                info = struct.from_buffer(buffer)
                info.used_size, info.prealloc_size = used, ahead
                info.write_to_buffer(buffer)
        except (OSError, ValueError) as e:
            logger.warning_once("KV tier: kvtop sees no use of this engine: %s", e)


def _shut_down(vmm: Any, device: torch.device, lock: threading.Lock) -> None:
    # For good: a thread that maps waits until the process ends.
    lock.acquire()
    torch.cuda.synchronize(device)
    vmm.shutdown_kvcached()


def shared_limit(num_bytes: int) -> SharedLimit | None:
    """A `SharedLimit`, or None where there is no place for it."""
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
    """Bytes of the driver's pages behind a KV cache.

    Args:
        layer_bytes: Of each layer.

    """
    size = _LARGEST_PAGE
    while size > _LEAST_PAGE and size * _PAGES_OF_A_LAYER > layer_bytes:
        size //= 2
    return size


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs, each from one up to before another."""
    first = end = -1
    for page in pages:
        if page != end:
            if end > first:
                yield first, end
            first = page
        end = page + 1
    if end > first:
        yield first, end
