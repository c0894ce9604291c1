# SPDX-License-Identifier: Apache-2.0
"""Random-weight models whose greedy outputs depend on the whole prompt."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


ROPE_DIM = 64
"""Elements of a head of MLA that know the position, beside the others."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int = 65536
    """Positions that it knows, in tokens."""
    latent: int = 0
    """Rank of the latent that MLA keeps of a token instead of keys and values, beside
    `ROPE_DIM` elements that all heads share; 0: no MLA."""
    window: int = 0
    """Tokens that all layers see but every sixth, which sees all; 0: all see all."""

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in the KV cache of all layers that keep it."""
        width = self.latent + ROPE_DIM if self.latent else 2 * self.kv_width
        return (self.layers // 6 if self.window else self.layers) * width * itemsize

    @property
    def kv_width(self) -> int:
        """Elements of the keys of a token in a layer, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the projections of the attention."""
        width = self.heads * self.head_dim
        if not self.latent:
            return {
                "q_proj": (width, self.hidden),
                "k_proj": (self.kv_width, self.hidden),
                "v_proj": (self.kv_width, self.hidden),
                "o_proj": (self.hidden, width),
            }
        return {
            "q_proj": (width + self.heads * ROPE_DIM, self.hidden),
            "kv_a_proj_with_mqa": (self.latent + ROPE_DIM, self.hidden),
            "kv_b_proj": (2 * width, self.latent),
            "o_proj": (self.hidden, width),
        }

    @property
    def num_parameters(self) -> int:
        """Of the whole model, norms aside."""
        attention = sum(rows * columns for rows, columns in self.attention.values())
        layer = attention + 3 * self.inner * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden


SHAPES = {
    "tiny": Shape(128, 256, 4, 4, 2, 32, 1024),
    "1b": Shape(2048, 8192, 16, 16, 8, 128, 32000),
    "1b-one-kv-head": Shape(2048, 8192, 16, 16, 1, 128, 32000),
    "1b-mla": Shape(2048, 8192, 16, 16, 16, 128, 32000, latent=512),
    "1b-window": Shape(2048, 8192, 18, 16, 8, 128, 32000, window=512),
    "tiny-window": Shape(128, 256, 6, 4, 2, 32, 1024, window=64),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 32000),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class Family:
    """An architecture, and the gains of its random weights.

    They keep greedy decoding lively: attention that picks some positions out of many,
    layers that add up to more than the last token's own embedding, and logits that are
    far enough apart for the rounding of a sum not to change the choice.
    """

    config: dict[str, Any]
    """What `config.json` says beside the sizes."""
    gains: dict[str, float] = field(default_factory=dict)
    """By projection, in units of its input's standard deviation; 1 if not named."""
    head_norm: float | None = None
    """Weight of the norms of queries and keys; None: there are none."""
    norm: float = 1.0
    """Weight of all other norms."""
    more_norms: tuple[str, ...] = ()
    """Further norms of a layer, by name."""
    scales_embeddings: bool = False
    """Whether the model multiplies its embeddings by sqrt(hidden)."""
    logit_std: float = 4.0


LLAMA = Family(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0},
)
DEEPSEEK = Family(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE_DIM,
        # No layer has experts.
        "first_k_dense_replace": 1 << 16,
    },
    {"q_proj": 2.0, "kv_a_proj_with_mqa": 2.0, "kv_b_proj": 2.0},
)
QWEN3 = Family(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    },
    {"o_proj": 1.5, "down_proj": 1.5},
    # Logits of the attention have a standard deviation of 2.25.
    head_norm=1.5,
    logit_std=3.0,
)
GEMMA3 = Family(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # Its norms multiply by their weight plus 1.
    head_norm=0.5,
    norm=0.0,
    more_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    scales_embeddings=True,
)


def family_of(shape: Shape) -> Family:
    """The architecture that has what the shape asks for."""
    if shape.latent:
        return DEEPSEEK
    return GEMMA3 if shape.window else LLAMA


def weights(
    shape: Shape,
    device: "torch.device | str",
    dtype: "torch.dtype",
    seed: int = 0,
    family: Family = LLAMA,
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Name and value of every parameter, made on `device` one at a time.

    The same seed gives the same bits on the same kind of device.
    """
    import torch

    g = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        w = torch.randn(rows, columns, generator=g, device=device, dtype=dtype)
        return w.mul_(gain / columns**0.5)

    norm = torch.full((shape.hidden,), family.norm, device=device, dtype=dtype)
    hidden, inner = shape.hidden, shape.inner
    projections = {
        **{f"self_attn.{name}": size for name, size in shape.attention.items()},
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        for name, (rows, columns) in projections.items():
            gain = family.gains.get(name.partition(".")[2], 1.0)
            yield f"{p}{name}.weight", normal(rows, columns, gain)
        if family.head_norm is not None:
            sharp = torch.full_like(norm[: shape.head_dim], family.head_norm)
            yield p + "self_attn.q_norm.weight", sharp
            yield p + "self_attn.k_norm.weight", sharp
        if shape.latent:
            latent = torch.ones(shape.latent, device=device, dtype=dtype)
            yield p + "self_attn.kv_a_layernorm.weight", latent
        for name in ("input_layernorm", "post_attention_layernorm", *family.more_norms):
            yield f"{p}{name}.weight", norm
    gain = 1.0 if family.scales_embeddings else hidden**0.5
    yield "model.embed_tokens.weight", normal(shape.vocab, hidden, gain)
    yield "model.norm.weight", norm
    yield "lm_head.weight", normal(shape.vocab, hidden, family.logit_std)


def write_config(
    folder: Path, shape: Shape, dtype: str, family: Family = LLAMA
) -> None:
    """Write `config.json`; `dtype` is torch's name of it, such as "bfloat16"."""
    folder.mkdir(parents=True, exist_ok=True)
    config = family.config | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.latent:
        config |= {
            "kv_lora_rank": shape.latent,
            "qk_nope_head_dim": shape.head_dim,
            "v_head_dim": shape.head_dim,
        }
    if shape.window:
        kinds = [*5 * ["sliding_attention"], "full_attention"]
        config |= {
            "sliding_window": shape.window,
            "layer_types": shape.layers // 6 * kinds,
            "query_pre_attn_scalar": shape.head_dim,
        }
    (folder / "config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    shape: Shape,
    device: str,
    family: Family = LLAMA,
    said: Iterable[int] | None = None,
    seed: int = 0,
) -> int:
    """Write a model folder: bfloat16 if made on "cuda", float32 if on "cpu".

    Args:
        folder: Made if missing.
        shape: The sizes.
        device: Where the weights are made.
        family: The architecture.
        said: Token ids that the model may say; None: all. The rows of all others are
            zero in the output layer, so that a greedy choice never falls on them.
        seed: The same seed gives the same bytes.

    Returns:
        The number of parameters.

    """
    import torch
    from safetensors.torch import save_file

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    write_config(folder, shape, str(dtype).removeprefix("torch."), family)
    files: dict[str, dict[str, torch.Tensor]] = {}
    names: dict[str, str] = {}
    for name, tensor in weights(shape, device, dtype, seed, family):
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        names[name] = f"layer-{layer}.safetensors" if layer else "rest.safetensors"
        # A tensor of its own: one file must not hold two names of one memory.
        kept = files.setdefault(names[name], {})[name] = tensor.to("cpu", copy=True)
        if name == "lm_head.weight" and said is not None:
            silent = torch.ones(shape.vocab, dtype=torch.bool)
            silent[sorted(set(said))] = False
            kept[silent] = 0
    for file, tensors in files.items():
        # Transformers wants to know who wrote it.
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))
    return sum(tensor.numel() for some in files.values() for tensor in some.values())
