# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV that a token takes, from a model's config.json."""

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


def kv_bytes_per_token(config: Path, tp: int, kv_cache_dtype: str) -> tuple[int, str]:
    """Bytes on all ranks together, and a note on what they leave out, or "".

    Upstream's `ModelConfig` reads the file; weights and tokenizer are not needed.

    Args:
        config: A Hugging Face config.json, or a folder that has one.
        tp: Tensor parallel size. Ranks share the KV heads; where there are fewer
            heads than ranks, and with MLA, ranks hold copies.
        kv_cache_dtype: A key of `ITEM_BYTES`, or "auto": the model's own.

    Raises:
        ValueError: There is no such file, or the model keeps more than KV.

    """
    # Imported here: it takes seconds, and only this function needs it.
    from vllm.config import ModelConfig

    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise ValueError(
            f"--model {config}: there is no such config.json. Give the file or its "
            "folder, or --kv-bytes-per-token."
        )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder, "config.json"))
        try:
            model = ModelConfig(model=folder, skip_tokenizer_init=True)
        except Exception as error:
            raise ValueError(
                f"--model {config}: vLLM cannot read it ({error}). Give "
                "--kv-bytes-per-token."
            ) from error
    if model.is_hybrid or model.is_attention_free:
        raise ValueError(
            f"--model {config}: it keeps states beside KV, whose size does not follow "
            "from tokens. Give --kv-bytes-per-token: bytes of a block of all groups, "
            "divided by its tokens."
        )
    dtype = kv_cache_dtype
    if dtype == "auto":
        dtype = str(model.dtype).removeprefix("torch.")
    vectors = 1 if model.use_mla else 2
    # It asks for this and nothing else; a real one wants as many GPUs.
    ranks: Any = SimpleNamespace(tensor_parallel_size=tp)
    rank_bytes = (
        vectors
        * _num_layers(model)
        * model.get_num_kv_heads(ranks)
        * model.get_head_size()
        * ITEM_BYTES[dtype]
    )
    note = ""
    if model.get_sliding_window() or "sliding" in json.dumps(
        getattr(model.hf_text_config, "layer_types", [])
    ):
        note = "layers with windows are counted as if they kept every token"
    return rank_bytes * tp, note


def _num_layers(model: Any) -> int:
    if hasattr(model, "get_total_num_hidden_layers"):
        return model.get_total_num_hidden_layers()
    # The first releases have it there only.
    return model.hf_text_config.num_hidden_layers
