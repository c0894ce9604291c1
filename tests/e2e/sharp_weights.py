# SPDX-License-Identifier: Apache-2.0
"""Load format `sharp`: random weights for any architecture, same in every process.

With upstream's `dummy` weights, which are nearly 0, every prompt gives the same
few tokens. These are large enough for attention to be sharp and for states to
last, so that greedy outputs depend on the whole prompt.
"""

import math
import zlib

import torch
from torch import nn

from vllm.config import ModelConfig
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.kv_tier.stores.identity import accept_loader

CAN_REGISTER = hasattr(model_loader, "register_model_loader")
LOAD_FORMAT = "sharp" if CAN_REGISTER else "dummy"
EMBED_SCALE = "sharp_embed_scale"
"""Setting of a model's config: size of embeddings. Where upstream uses them for the
outputs too, large ones have each token followed by itself."""


class SharpLoader(DummyModelLoader):
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for name, parameter in model.named_parameters():
            g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=g)
            values = _scaled(name, values)
            if "embed_tokens" in name:
                values *= getattr(model_config.hf_config, EMBED_SCALE, 1.0)
            parameter.data.copy_(values)


if CAN_REGISTER:
    model_loader.register_model_loader(LOAD_FORMAT)(SharpLoader)
    accept_loader(LOAD_FORMAT)
else:
    # The first releases know no formats of others.
    model_loader.DummyModelLoader = SharpLoader  # type: ignore[misc]


def _scaled(name: str, normal: torch.Tensor) -> torch.Tensor:
    """`normal`, standard normal values, as weights of the parameter `name`."""
    *_, leaf = name.split(".")
    if leaf == "A":
        # Decay of a Mamba state: slow, else it forgets the prompt.
        return -torch.exp(normal - 4)
    if leaf in ("A_log", "dt_bias"):
        return normal - 2
    if leaf == "D":
        return torch.ones_like(normal)
    if "norm" in name and normal.ndim == 1:
        # Queries and keys that are normalised get sharp by the weight.
        sharp = any(
            s in name for s in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
        )
        return torch.full_like(normal, 2.0 if sharp else 1.0)
    if normal.ndim < 2:
        return normal * 0.1
    if "embed" in name:
        return normal
    if "lm_head" in name:
        return normal * 0.5
    gain = 2.2 if "attn" in name else 1.1
    return normal * (gain / math.sqrt(normal.shape[-1]))
