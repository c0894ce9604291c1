# SPDX-License-Identifier: Apache-2.0
"""Where the KV cache of an engine lies, and where those lie that profiling makes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.elastic import device_memory, kvcached
from vllm.v1.kv_tier.elastic.kvcached import (
    KvcachedMemory,
    _runs,
    page_bytes,
    shared_limit,
)
from vllm.v1.worker import utils

from ...names import WorkerWrapperBase
from .test_gpu_pages import (
    NUM_BLOCKS,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE,
    PAGE_BYTES,
    Gpu,
    Memory,
)

NUM_BYTES = NUM_LAYERS * NUM_BLOCKS * 24
HAS_SEAM = hasattr(utils, "new_kv_cache")


class Worker:
    """Makes its KV caches as upstream's model runners do."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.model_runner: Any = SimpleNamespace(kv_caches=[], device=self.device)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        caches = allocate(kv_cache_config)
        self.model_runner.kv_caches = [caches]


def allocate(kv_cache_config: Any) -> torch.Tensor:
    """The seam of `allocate_kv_cache`, and the views that it makes."""
    tensor = SimpleNamespace(size=NUM_BYTES, layers=["layer"])
    config: Any = SimpleNamespace(
        kv_cache_tensors=[tensor],
        kv_cache_groups=[
            SimpleNamespace(
                layer_names=["layer"],
                kv_cache_spec=SimpleNamespace(has_layer_views=False),
            )
        ],
    )
    cpu = torch.device("cpu")
    found = utils.allocate_kv_cache(config, cpu, None)["layer"]  # type: ignore[arg-type]
    return found.view(NUM_LAYERS, NUM_BLOCKS, 24)


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A wrapper whose engine gives memory back, on a GPU that is none."""
    gpu = Gpu()
    made: list[Memory] = []

    class Made(Memory):
        def __init__(
            self, num_bytes: int, num_layers: int, device: torch.device
        ) -> None:
            super().__init__(gpu)
            assert num_layers == 1
            made.append(self)
            self.memory = self.cache.view(torch.int8)

    monkeypatch.setattr(device_memory, "KvcachedMemory", Made)
    config = KVTierConfig(size_bytes=1, shrink_after_s=1.0)
    monkeypatch.setattr(device_memory, "tier_config", lambda _: config)
    found: Any = WorkerWrapperBase.__new__(WorkerWrapperBase)
    found.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(),
        device_config=SimpleNamespace(device_type="cuda"),
        instance_id="",
        fault_tolerance=None,
    )
    found.worker, found.global_rank = Worker(), 0
    found.gpu, found.made = gpu, made
    return found


def initialize(wrapper: Any) -> None:
    config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_tensors=["layer"])
    wrapper.initialize_from_config([config])


@pytest.mark.skipif(not HAS_SEAM, reason="another way to make KV caches")
def test_the_kv_cache_of_an_engine_may_lie_elsewhere(wrapper: Any) -> None:
    profiled = allocate(None)
    assert not wrapper.made
    initialize(wrapper)
    pages, absent = device_memory.device_pages(wrapper) or (None, None)
    assert pages is not None and absent == []
    assert pages.num_pages == NUM_PAGES
    assert wrapper.gpu.total - wrapper.gpu.free == pages.mapped_bytes > 0
    assert device_memory.num_mapped(wrapper, NUM_BLOCKS) == NUM_BLOCKS
    assert len(wrapper.made) == 1 and not profiled.any()
    allocate(None)
    assert len(wrapper.made) == 1


@pytest.mark.skipif(not HAS_SEAM, reason="another way to make KV caches")
def test_part_of_the_kv_cache_has_memory_at_first(wrapper: Any) -> None:
    wrapper.gpu.free = wrapper.gpu.total // 50 + 5 * PAGE_BYTES
    initialize(wrapper)
    found = device_memory.device_pages(wrapper)
    assert found is not None and found[1]
    assert device_memory.num_mapped(wrapper, NUM_BLOCKS) == found[1][0] * PAGE


@pytest.mark.skipif(not HAS_SEAM, reason="another way to make KV caches")
def test_without_any_memory_there_is_no_engine(wrapper: Any) -> None:
    wrapper.gpu.free = wrapper.gpu.total // 50
    with pytest.raises(ValueError, match="there is no GPU memory for the first page"):
        initialize(wrapper)


@pytest.mark.skipif(not HAS_SEAM, reason="another way to make KV caches")
def test_kv_caches_that_lie_elsewhere(wrapper: Any) -> None:
    def elsewhere(config: Any) -> None:
        allocate(config)
        wrapper.worker.model_runner.kv_caches = [torch.zeros(2, NUM_BLOCKS, 8)]

    wrapper.worker.initialize_from_config = elsewhere
    with pytest.raises(ValueError, match="does not know the layout"):
        initialize(wrapper)


def test_a_kv_cache_that_torch_made_cannot_be_given_back(wrapper: Any) -> None:
    with pytest.raises(ValueError, match="needs vLLM v0.30.0 or newer"):
        device_memory.device_pages(wrapper)


def test_workers_for_cpus_have_no_pages_whether_they_know_their_device_or_not(
    wrapper: Any,
) -> None:
    wrapper.vllm_config.device_config.device_type = "cpu"
    wrapper.worker.device = None
    assert device_memory.device_pages(wrapper) is None


def test_memory_of_a_library_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="kvcached on a GPU, which cannot be loaded"):
        KvcachedMemory(1, 1, torch.device("cuda", 0))
    assert shared_limit(1) is None


class Library:
    """kvcached's library: it maps page by page, and raises where there is no memory."""

    def __init__(self) -> None:
        self.free = 0
        self.mapped: set[int] = set()

    def init_kvcached(self, device: str, page_bytes: int, contiguous: bool) -> None:
        pass

    def create_kv_tensors(self, num_bytes: int, *others: Any) -> list[torch.Tensor]:
        return [torch.zeros(num_bytes, dtype=torch.int8)]

    def map_to_kv_tensors(self, offsets: list[int], group: int) -> bool:
        for offset in offsets:
            assert offset not in self.mapped, "an error in its log"
            if not self.free:
                raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
            self.free -= 1
            self.mapped.add(offset)
        return True

    def unmap_from_kv_tensors(self, offsets: list[int], group: int) -> bool:
        assert self.mapped >= set(offsets), "an error in its log"
        self.mapped -= set(offsets)
        self.free += len(offsets)
        return True


def test_pages_for_which_memory_ends_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine has taken the rest meanwhile, and would wait for it."""
    library = Library()
    monkeypatch.setattr(kvcached, "_load", lambda: library)
    monkeypatch.setattr(kvcached, "_is_taken", False)
    monkeypatch.setattr(kvcached, "Finalize", lambda *args, **kwargs: None)
    for name in ("Stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: None)
    memory = KvcachedMemory(8 << 20, 1, torch.device("cuda", 0))
    monkeypatch.setattr(memory, "_clear", lambda pages: None)
    library.free = 3
    assert not memory.map([0, 1, 2, 3])
    assert (library.free, library.mapped) == (3, set())
    library.free = 4
    assert memory.map([0, 1, 2, 3])
    assert len(library.mapped) == 4


@pytest.mark.parametrize(
    ("layer_mib", "page_mib"),
    [(1, 2), (128, 2), (255, 2), (256, 4), (512, 8), (1023, 8), (1024, 16), (9999, 16)],
)
def test_large_caches_have_large_pages(layer_mib: int, page_mib: int) -> None:
    """They take fewer calls of the driver, and each page is a small part still."""
    assert page_bytes(layer_mib << 20) == page_mib << 20


def test_runs_of_pages() -> None:
    assert list(_runs([])) == []
    assert list(_runs([3])) == [(3, 4)]
    assert list(_runs([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
