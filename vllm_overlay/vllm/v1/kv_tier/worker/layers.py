# SPDX-License-Identifier: Apache-2.0
"""Attention layers that wait for their own part of a step's loads.

The loads of a step run in the order of the layers. If each layer waits for its own, the
first layers compute while the last ones are still loading.

Python must run at every layer for that, which it does not where one CUDA graph holds
the whole forward pass. `HostTier` arms the waits only for steps that cannot run as one
graph. `disarm` returns whether every layer waited; if not, the loads count as failed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.memory.regions import Region, flatten

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class End(Protocol):
    """The end of a part of the loads."""

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the end."""


class LayerWaits:
    """The waits of a rank's layers.

    Args:
        regions: By layer name, the last region that the layer reads.
        max_decode_tokens: Most tokens of a request in a step that may run as one CUDA
            graph.

    """

    def __init__(self, regions: Mapping[str, int], max_decode_tokens: int) -> None:
        self.regions = regions
        self.max_decode_tokens = max_decode_tokens
        self.is_armed = False
        self.use: Callable[[LayerWaits], None] = lambda waits: None
        """Makes the layers of this process use these waits. A process may run ranks of
        several engines."""
        self._ends: Sequence[End] = ()
        self._part_of: dict[str, int] = {}
        self._num_waited = 0

    def arm(self, parts: Sequence[range], ends: Sequence[End]) -> None:
        """Let the layers of this step wait.

        Args:
            parts: Regions of each part of the loads: all regions, in order.
            ends: The end of each part.

        """
        part_of_region = [i for i, part in enumerate(parts) for _ in part]
        self._part_of = {
            layer: part_of_region[region] for layer, region in self.regions.items()
        }
        self._ends = ends
        self._num_waited = 0
        self.is_armed = True
        self.use(self)

    def wait(self, layer: str) -> None:
        part = self._part_of.pop(layer, -1)
        # Parts end in order.
        if part >= self._num_waited:
            self._ends[part].wait(torch.cuda.current_stream())
            self._num_waited = part + 1

    def disarm(self) -> bool:
        """Stop the waits once the step is queued. Returns whether all layers waited."""
        self.is_armed = False
        self._ends = ()
        return not self._part_of


def make_layer_waits(
    vllm_config: "VllmConfig", regions: Sequence[Region]
) -> LayerWaits | None:
    """The waits of this rank; None if steps must wait for all loads at once."""
    reason = next(_obstacles(vllm_config), None)
    layers: dict[str, int] = {}
    if reason is None:
        context = vllm_config.compilation_config.static_forward_context
        for name, layer in context.items():
            last = max(_regions_of(layer, regions), default=None)
            if last is None:
                continue
            if releases.attention_backend(layer) is None:
                reason = f"{type(layer).__name__} is not an attention layer"
                break
            layers[name] = last
    if reason is not None:
        logger.info("KV tier: steps wait for all their loads at once: %s.", reason)
        return None
    return LayerWaits(layers, max_decode_tokens=1)


def _obstacles(vllm_config: "VllmConfig") -> Iterator[str]:
    """Why Python may not run at each layer, or other code may read blocks."""
    if releases.may_capture_whole_forward(vllm_config.compilation_config):
        yield "one CUDA graph may hold the forward pass"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding reads blocks in its own steps"
    if vllm_config.kv_transfer_config is not None:
        yield "a KV connector reads blocks too"
    if releases.has_micro_batches(vllm_config.parallel_config):
        yield "micro-batches compute on several streams"


def _regions_of(layer: Any, regions: Sequence[Region]) -> Iterator[int]:
    """Indices of the regions that overlap the KV cache of `layer`."""
    for tensor in flatten(releases.kv_caches_of(layer)):
        start, end = _extent(tensor)
        for i, region in enumerate(regions):
            first, last = _extent(region.blocks)
            if first < end and start < last:
                yield i


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor, and the address after its last byte."""
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    size = tensor.element_size()
    return tensor.data_ptr(), tensor.data_ptr() + (sum(steps) + 1) * size


_waits: LayerWaits | None = None


def set_layer_waits(waits: LayerWaits | None) -> None:
    """Set the waits of the rank whose step this process runs."""
    global _waits
    _waits = waits


def wait_for_layer_load(layer: str) -> None:
    """Wait for a layer's loads. Called by every attention layer."""
    if _waits is not None and _waits.is_armed:
        _waits.wait(layer)
