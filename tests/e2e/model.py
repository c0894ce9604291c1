# SPDX-License-Identifier: Apache-2.0
"""Small random-weight models of real architectures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB_SIZE = 1024

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LORA_RANK = 4


def make_lora(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for `make_llama` that changes every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = LLAMA["hidden_size"]
    kv = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    outputs = {"q_proj": hidden, "v_proj": kv}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "target_modules": list(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    g = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for i in range(LLAMA["num_hidden_layers"]):
        for module, size in outputs.items():
            name = f"base_model.model.model.layers.{i}.self_attn.{module}"
            a = torch.randn(LORA_RANK, hidden, generator=g) * 0.2
            b = torch.randn(size, LORA_RANK, generator=g) * 0.2
            weights |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def make_tokenizer(folder: Path, special_tokens: Sequence[str] = ()) -> None:
    """Write a tokenizer with a word for each token: `t3` is token 3.

    Args:
        folder: Of the model.
        special_tokens: Have the numbers behind those of the words.

    """
    words = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "bos_token": "t1",
        "eos_token": "t2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_llama(folder: Path, seed: int = 0, kv_heads: int | None = None) -> Path:
    """Write a Llama whose greedy outputs depend on the whole prompt.

    Weights are large enough for attention to be sharp: with the usual small
    initialisation every prompt gives the same few tokens, and a test of the KV
    cache cannot fail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA | ({"num_key_value_heads": kv_heads} if kv_heads else {})
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
    g = torch.Generator().manual_seed(seed)
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    kv = config["num_key_value_heads"] * LLAMA["head_dim"]

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * std

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCAB_SIZE, hidden, std=0.5),
    }
    for i in range(LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "self_attn.q_proj.weight": normal(hidden, hidden, std=0.2),
            layer + "self_attn.k_proj.weight": normal(kv, hidden, std=0.2),
            layer + "self_attn.v_proj.weight": normal(kv, hidden, std=0.2),
            layer + "self_attn.o_proj.weight": normal(hidden, hidden, std=0.2),
            layer + "mlp.gate_proj.weight": normal(inner, hidden, std=0.1),
            layer + "mlp.up_proj.weight": normal(inner, hidden, std=0.1),
            layer + "mlp.down_proj.weight": normal(hidden, inner, std=0.1),
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


def make_eagle(folder: Path, llama: Path, seed: int = 7) -> Path:
    """Write an EAGLE draft model for a `make_llama`: one layer, and poor guesses."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA | {
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB_SIZE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(llama / "model.safetensors")
    hidden = LLAMA["hidden_size"]
    g = torch.Generator().manual_seed(seed)
    # Its guess follows the token that it continues, and the Llama's state.
    mix = torch.randn(hidden, 2 * hidden, generator=g) * 0.1
    mine = {"fc.weight": mix}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        # The first layer of a draft model has no norm of its own.
        is_norm = name.endswith("input_layernorm.weight")
        if name == "embed_tokens.weight" or (
            name.startswith("layers.0.") and not is_norm
        ):
            mine[name] = weight.clone()
    save_file(mine, folder / "model.safetensors")
    return folder
