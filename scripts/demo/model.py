# SPDX-License-Identifier: Apache-2.0
"""A model folder made from nothing: a Qwen3 of random weights, a real tokenizer."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from transformers import LlamaTokenizer, PreTrainedTokenizerBase

# Mistral's 32,768-piece SentencePiece model, which mistral-common ships.
TOKENIZER = "mistral_instruct_tokenizer_240323.model.v3"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

# Standard deviations in units of a layer's input. They keep greedy decoding
# lively: attention that picks a few positions out of a thousand (its logits have
# the standard deviation ATTENTION_SHARPNESS), layers that add up to more than the
# last token's own embedding, and logits far enough apart that the rounding of a
# float32 sum does not change the choice.
ATTENTION_SHARPNESS = 2.25
BRANCH_GAIN = 1.5
LOGIT_STD = 3.0


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model, under the names that `config.json` gives them."""

    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 10
    num_attention_heads: int = 12
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 32768
    max_position_embeddings: int = 4096

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token takes, all layers."""
        heads = 2 * self.num_key_value_heads * self.num_hidden_layers
        return heads * self.head_dim * torch.float32.itemsize


def write_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Writes the tokenizer and its chat template to `folder`; returns it."""
    with TemporaryDirectory() as temporary:
        with as_file(files("mistral_common.data") / TOKENIZER) as source:
            shutil.copyfile(source, Path(temporary, "tokenizer.model"))
        tokenizer: PreTrainedTokenizerBase = LlamaTokenizer.from_pretrained(temporary)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(
    folder: Path, shape: ModelShape, tokens: Iterable[int], seed: int = 0
) -> int:
    """Writes `config.json` and `model.safetensors` to `folder`.

    Args:
        folder: made if missing.
        shape: the sizes.
        tokens: the ids that the model may say. The rows of all others are zero in
            the output layer, so that a greedy choice never falls on them.
        seed: the same seed gives the same bytes.

    Returns:
        The number of parameters.

    """
    folder.mkdir(parents=True, exist_ok=True)
    config = asdict(shape) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    weights = dict(_layers(shape, normal))
    weights["model.embed_tokens.weight"] = normal(
        shape.vocab_size, shape.hidden_size, 1.0
    )
    weights["model.norm.weight"] = torch.ones(shape.hidden_size)
    said = torch.zeros(shape.vocab_size, 1)
    said[sorted(set(tokens))] = 1
    weights["lm_head.weight"] = said * normal(
        shape.vocab_size, shape.hidden_size, LOGIT_STD * shape.hidden_size**-0.5
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def _layers(
    shape: ModelShape, normal: Callable[[int, int, float], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of the decoder layers."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    for layer in range(shape.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", torch.ones(hidden)
        yield f"{name}.post_attention_layernorm.weight", torch.ones(hidden)
        sharpness = torch.full((shape.head_dim,), ATTENTION_SHARPNESS**0.5)
        yield f"{name}.self_attn.q_norm.weight", sharpness
        yield f"{name}.self_attn.k_norm.weight", sharpness.clone()
        for projection, rows, columns, gain in (
            ("self_attn.q_proj", queries, hidden, 1.0),
            ("self_attn.k_proj", keys, hidden, 1.0),
            ("self_attn.v_proj", keys, hidden, 1.0),
            ("self_attn.o_proj", hidden, queries, BRANCH_GAIN),
            ("mlp.gate_proj", inner, hidden, 1.0),
            ("mlp.up_proj", inner, hidden, 1.0),
            ("mlp.down_proj", hidden, inner, BRANCH_GAIN),
        ):
            weight = normal(rows, columns, gain * columns**-0.5)
            yield f"{name}.{projection}.weight", weight
