# SPDX-License-Identifier: Apache-2.0
"""A load format of vLLM that makes the weights on the device: no files.

Import it before the engine starts. The engine core, forked or spawned from a process
whose main module imports it, knows the format too.
"""

import torch
from torch import nn

from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.kv_tier.stores.identity import accept_loader

from .model import Shape, weights

LOAD_FORMAT = "bench_random"
# Weights depend on the shape alone, which is in the model's folder.
accept_loader(LOAD_FORMAT)


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Fills a Llama with `suite.model.weights`, the same bits in every process."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        c = model_config.hf_config
        shape = Shape(
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            layers=c.num_hidden_layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            vocab=c.vocab_size,
        )
        device = next(model.parameters()).device
        with torch.no_grad():
            loaded = model.load_weights(weights(shape, device, model_config.dtype))
        missing = {name for name, _ in model.named_parameters()} - set(loaded)
        if missing:
            raise RuntimeError(f"Parameters without a value: {sorted(missing)}")
