# SPDX-License-Identifier: Apache-2.0
"""Local stand-ins for the hub models that upstream's tests name.

usage: python hub.py HF_HOME      (with the Python of the environment under test)

Each stand-in is a snapshot in the layout of the hub's cache: a config.json made by
transformers' own class with the sizes that the tests rely on, and where a test asks
for it a processor with a byte-level tokenizer. No test of our suites reads weights.
"""

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

try:
    from transformers import Qwen3NextConfig
except ImportError:
    # Those of the first releases have no such model, and no test names it.
    Qwen3NextConfig = None

REVISION = "0" * 40
IMAGE_TOKEN = "<image>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, then `</s>` and `<image>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken(IMAGE_TOKEN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>"
    )


def opt(**sizes: int) -> OPTConfig:
    return OPTConfig(
        architectures=["OPTForCausalLM"], dtype="float16", vocab_size=50272, **sizes
    )


def llava(tokenizer: PreTrainedTokenizerFast) -> list:
    image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    config = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        dtype="float16",
        image_token_index=image_token_id,
        text_config=LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=32064,
            max_position_embeddings=4096,
        ),
    )
    vision = config.vision_config
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": vision.image_size},
            crop_size={"height": vision.image_size, "width": vision.image_size},
        ),
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    )
    return [config, processor]


def stand_ins() -> dict[str, list]:
    """Model name to the transformers objects whose files make its snapshot."""
    gpt2 = GPT2Config(architectures=["GPT2LMHeadModel"], n_layer=6)
    qwen2 = Qwen2Config(architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    qwen3 = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=40960,
    )
    newer: dict[str, list] = {}
    if Qwen3NextConfig is not None:
        newer["Qwen/Qwen3-Next-80B-A3B-Instruct"] = [
            Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], dtype="bfloat16")
        ]
    opt_350m = opt(
        hidden_size=1024, ffn_dim=4096, num_attention_heads=16, num_hidden_layers=24
    )
    return {
        "distilbert/distilgpt2": [gpt2],
        "facebook/opt-125m": [opt()],
        "facebook/opt-350m": [opt_350m],
        "llava-hf/llava-1.5-7b-hf": llava(byte_tokenizer()),
        "Qwen/Qwen1.5-7B": [qwen2],
        "Qwen/Qwen3-0.6B": [qwen3],
        **newer,
    }


def make_hub(hf_home: Path) -> None:
    """Write the snapshots of all stand-ins below `hf_home`."""
    for name, parts in stand_ins().items():
        model = hf_home / "hub" / f"models--{name.replace('/', '--')}"
        for part in parts:
            part.save_pretrained(model / "snapshots" / REVISION)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(REVISION)


if __name__ == "__main__":
    make_hub(Path(sys.argv[1]))
