# SPDX-License-Identifier: Apache-2.0
"""What the tier does not support is refused before an engine starts, with words."""

import json
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from .model import LLAMA, VOCAB_SIZE
from .release import ENVIRONMENT, known

# Attends to both sides: upstream turns prefix caching off.
ENCODER: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "torch_dtype": "float32",
}

# Upstream turns prefix caching off for it, too.
ENCODER_DECODER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": VOCAB_SIZE,
    "torch_dtype": "float32",
}

CASES = [
    pytest.param(
        config,
        settings,
        words,
        marks=pytest.mark.compat("refused at start", row),
        id=row,
    )
    for row, config, settings, words in [
        ("encoder (BERT)", ENCODER, {}, "or a model that cannot use it"),
        ("encoder-decoder (Whisper)", ENCODER_DECODER, {}, "encoder-decoder models"),
        (
            "encoder-decoder (Whisper), prefix caching asked for",
            ENCODER_DECODER,
            {"enable_prefix_caching": True},
            "encoder-decoder models",
        ),
        (
            "prefix caching off",
            LLAMA,
            {"enable_prefix_caching": False},
            "Turn prefix caching on",
        ),
    ]
]


@pytest.mark.parametrize("config, settings, words", CASES)
def test_refused(
    config: dict[str, Any],
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    asks_first = "get_encdec_max_encoder_len" in getsource(VllmConfig.__post_init__)
    if config is ENCODER_DECODER and asks_first:
        pytest.skip("this release loads the processor of such a model before")
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        **known({"kv_cache_memory_bytes": 1 << 20}),
        kv_offloading_backend="core",
        kv_offloading_size=0.1,
        **settings,
    )
    with pytest.raises((ValueError, NotImplementedError)) as error:
        args.create_engine_config()
    if "VLLM_USE_V1=1 is not supported" in str(error.value):
        pytest.skip("V1 of this release refuses such models by itself")
    assert isinstance(error.value, ValueError)
    assert "--kv-offloading-backend core" in str(error.value)
    assert words in str(error.value)
    assert "Remove the backend" in str(error.value) or "or remove" in str(error.value)
