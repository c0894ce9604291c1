# SPDX-License-Identifier: Apache-2.0
"""Random-weight Llamas whose greedy outputs depend on the whole prompt."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, in elements."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


SHAPES = {
    "tiny": Shape(128, 256, 4, 4, 2, 32, 1024),
    "1b": Shape(2048, 8192, 16, 16, 8, 128, 32000),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 32000),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
}


def weights(
    shape: Shape, device: "torch.device | str", dtype: "torch.dtype", seed: int = 0
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Name and value of every parameter, made on `device` one at a time.

    The gains keep greedy decoding lively: attention that picks some positions out of
    many, and logits that are far apart. The same seed gives the same bits on the same
    kind of device.
    """
    import torch

    g = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        w = torch.randn(rows, columns, generator=g, device=device, dtype=dtype)
        return w.mul_(gain / columns**0.5)

    ones = torch.ones(shape.hidden, device=device, dtype=dtype)
    hidden, inner = shape.hidden, shape.inner
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        yield p + "self_attn.q_proj.weight", normal(q, hidden, 2.0)
        yield p + "self_attn.k_proj.weight", normal(kv, hidden, 2.0)
        yield p + "self_attn.v_proj.weight", normal(kv, hidden, 1.0)
        yield p + "self_attn.o_proj.weight", normal(hidden, q, 2.0)
        yield p + "mlp.gate_proj.weight", normal(inner, hidden, 1.0)
        yield p + "mlp.up_proj.weight", normal(inner, hidden, 1.0)
        yield p + "mlp.down_proj.weight", normal(hidden, inner, 1.0)
        yield p + "input_layernorm.weight", ones
        yield p + "post_attention_layernorm.weight", ones
    yield "model.embed_tokens.weight", normal(shape.vocab, hidden, hidden**0.5)
    yield "model.norm.weight", ones
    yield "lm_head.weight", normal(shape.vocab, hidden, 4.0)


def write_config(folder: Path, shape: Shape, dtype: str) -> None:
    """Write `config.json`; `dtype` is torch's name of it, such as "bfloat16"."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 65536,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_model(folder: Path, shape: Shape, device: str) -> None:
    """Write a model folder: bfloat16 if made on "cuda", float32 if on "cpu"."""
    import torch
    from safetensors.torch import save_file

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    write_config(folder, shape, str(dtype).removeprefix("torch."))
    files: dict[str, dict[str, torch.Tensor]] = {}
    names: dict[str, str] = {}
    for name, tensor in weights(shape, device, dtype):
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        names[name] = f"layer-{layer}.safetensors" if layer else "rest.safetensors"
        # A tensor of its own: one file must not hold two names of one memory.
        files.setdefault(names[name], {})[name] = tensor.to("cpu", copy=True)
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))
