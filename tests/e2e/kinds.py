# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: small configs of real architectures, and engines for each.

Weights are those of `sharp_weights`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .jobs import COMMON, SMALL, Job
from .model import LLAMA, VOCAB_SIZE, make_tokenizer
from .sharp_weights import EMBED_SCALE, LOAD_FORMAT

CACHE_BYTES = 256 << 20
"""Room for the device cache; engines use `num_device_blocks` of it."""
HOST_GIB = 0.125

WORKLOADS = ["conversations", "overcommit"]
CONTROL = "corrupt_each_group"


@dataclass
class Kind:
    """An architecture and how it is run."""

    config: dict[str, Any]
    groups: list[str]
    """Spec of each KV cache group, as upstream makes them."""
    llm: dict[str, Any] = field(default_factory=dict)
    workloads: list[str] = field(default_factory=lambda: WORKLOADS)
    control: str = CONTROL
    """Workload that damages the tier. Asks what the first of `workloads` asks."""
    num_device_blocks: int = SMALL
    """Of the engines with a tier; less than the conversations need."""
    files: dict[str, Any] = field(default_factory=dict)
    """Further JSON files of the model, by name."""
    special_tokens: list[str] = field(default_factory=list)
    """Follow the words in the vocabulary."""

    def jobs(self) -> dict[str, Job]:
        """`large`, whose device cache holds everything, and two with a tier."""
        common = (
            COMMON
            | {"load_format": LOAD_FORMAT, "kv_cache_memory_bytes": CACHE_BYTES}
            | self.llm
        )
        small = common | {"num_gpu_blocks_override": self.num_device_blocks}
        every = {"store_from_use": 1}
        tier = {
            "kv_offloading_backend": "core",
            "kv_offloading_size": HOST_GIB,
            "kv_offloading_config": {"debug": every},
        }
        through = {
            "kv_offloading_config": {"debug": every | {"store_policy": "write_through"}}
        }
        workloads = [*self.workloads, self.control]
        return {
            "large": Job(common | {"num_gpu_blocks_override": 2000}, self.workloads),
            "write_back": Job(small | tier, workloads),
            "write_through": Job(small | tier | through, workloads),
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {"config.json": self.config, **self.files}.items():
            (folder / name).write_text(json.dumps(content))
        make_tokenizer(folder, self.special_tokens)
        return folder


def like_llama(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    names = {"architectures": [architecture], "model_type": model_type}
    return LLAMA | names | config


ALIGN = {"mamba_cache_mode": "align", "enable_prefix_caching": True}
# Has no kernels for float32. One request at a time, because sums in bfloat16
# depend on how many are in the batch.
BF16 = {"dtype": "bfloat16", "max_num_seqs": 1}

_WINDOW = 64
_ALTERNATING = 2 * ["sliding_attention", "full_attention"]

DEEPSEEK = like_llama(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=64,
    # Other sizes have no kernel.
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)

KINDS = {
    "qwen3": Kind(
        like_llama("Qwen3ForCausalLM", "qwen3"),
        ["FullAttentionSpec"],
    ),
    # Three layers with windows make two groups, of which one needs half a block.
    "gemma3": Kind(
        like_llama(
            "Gemma3ForCausalLM",
            "gemma3_text",
            num_hidden_layers=5,
            layer_types=[*_ALTERNATING, "sliding_attention"],
            sliding_window=_WINDOW,
            query_pre_attn_scalar=32,
            hidden_activation="gelu_pytorch_tanh",
        ),
        ["FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"],
        num_device_blocks=3 * SMALL,
    ),
    "mistral_window": Kind(
        like_llama("MistralForCausalLM", "mistral", sliding_window=_WINDOW),
        ["SlidingWindowSpec"],
        # The window lets go of blocks: requests need few.
        {"max_num_batched_tokens": 64},
        num_device_blocks=10,
    ),
    "qwen3_moe": Kind(
        like_llama(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        ["FullAttentionSpec"],
    ),
    "mixtral": Kind(
        like_llama(
            "MixtralForCausalLM",
            "mixtral",
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        ["FullAttentionSpec"],
    ),
    "gpt_oss": Kind(
        like_llama(
            "GptOssForCausalLM",
            "gpt_oss",
            layer_types=_ALTERNATING,
            sliding_window=_WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            swiglu_limit=7.0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 2048,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        ),
        ["FullAttentionSpec", "SlidingWindowSpec"],
        num_device_blocks=2 * SMALL,
    ),
    "deepseek_v3": Kind(
        DEEPSEEK,
        ["MLAAttentionSpec"],
        BF16,
    ),
    "llama4": Kind(
        like_llama(
            "Llama4ForCausalLM",
            "llama4_text",
            attention_chunk_size=128,
            layer_types=2 * ["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0, 1, 0],
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=256,
            use_qk_norm=False,
            attn_temperature_tuning=False,
        ),
        ["FullAttentionSpec", "ChunkedLocalAttentionSpec"],
        num_device_blocks=2 * SMALL,
    ),
    "falcon_h1": Kind(
        like_llama(
            "FalconH1ForCausalLM",
            "falcon_h1",
            mamba_d_ssm=128,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
        ),
        ["FullAttentionSpec", "MambaSpec"],
        ALIGN,
        num_device_blocks=32,
    ),
    "qwen3_next": Kind(
        like_llama(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            layer_types=2 * ["linear_attention", "full_attention"],
            linear_conv_kernel_dim=4,
            num_key_value_heads=4,
            head_dim=64,
            # Smaller ones have no kernel.
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            partial_rotary_factor=0.5,
        ),
        ["FullAttentionSpec", "MambaSpec"],
        ALIGN | BF16,
        num_device_blocks=32,
    ),
    "lfm2": Kind(
        like_llama(
            "Lfm2ForCausalLM",
            "lfm2",
            layer_types=2 * ["conv", "full_attention"],
            conv_L_cache=3,
            conv_bias=False,
            tie_embedding=False,
            conv_dim=128,
            conv_dim_out=128,
            conv_use_xavier_init=True,
            block_dim=128,
            block_ff_dim=256,
            block_auto_adjust_ff_dim=False,
            norm_eps=1e-5,
        ),
        ["FullAttentionSpec", "MambaSpec"],
        # Upstream's layer for CPUs mixes up requests that share a step.
        ALIGN | {"max_num_seqs": 1},
        num_device_blocks=32,
    ),
    # The last two layers read the KV of earlier ones.
    "gemma3n": Kind(
        like_llama(
            "Gemma3nForCausalLM",
            "gemma3n_text",
            layer_types=3 * ["sliding_attention", "full_attention"],
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            sliding_window=_WINDOW,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=VOCAB_SIZE,
            laurel_rank=16,
            altup_num_inputs=2,
            activation_sparsity_pattern=6 * [0.0],
            hidden_activation="gelu_pytorch_tanh",
            **{EMBED_SCALE: 0.04},
        ),
        ["FullAttentionSpec", "SlidingWindowSpec"],
        num_device_blocks=2 * SMALL,
    ),
    # Layers of the window have smaller heads: their blocks hold more tokens.
    "gemma4": Kind(
        like_llama(
            "Gemma4ForCausalLM",
            "gemma4_text",
            layer_types=_ALTERNATING,
            sliding_window=_WINDOW,
            head_dim=32,
            global_head_dim=64,
            num_global_key_value_heads=2,
            hidden_size_per_layer_input=0,
            hidden_activation="gelu_pytorch_tanh",
            enable_moe_block=False,
        ),
        ["FullAttentionSpec", "SlidingWindowSpec"],
        num_device_blocks=SMALL + SMALL // 2,
    ),
    "deepseek_mtp": Kind(
        DEEPSEEK | {"num_nextn_predict_layers": 1},
        ["MLAAttentionSpec"],
        BF16 | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
    "fp8_cache": Kind(
        like_llama("Qwen3ForCausalLM", "qwen3"),
        ["FullAttentionSpec"],
        {"kv_cache_dtype": "fp8"},
    ),
}

ROWS = {
    "qwen3": "full attention (Qwen3)",
    "gemma3": "full attention and sliding windows (Gemma-3)",
    "mistral_window": "sliding window only (Mistral)",
    "qwen3_moe": "mixture of experts (Qwen3-MoE)",
    "mixtral": "mixture of experts (Mixtral)",
    "gpt_oss": "full attention and sliding windows, sinks (gpt-oss)",
    "deepseek_v3": "MLA (DeepSeek-V3)",
    "deepseek_mtp": "MLA with MTP speculative decoding (DeepSeek-V3)",
    "llama4": "full and chunked local attention (Llama-4)",
    "falcon_h1": "full attention and Mamba-2 (Falcon-H1)",
    "qwen3_next": "full attention and GDN (Qwen3-Next)",
    "lfm2": "full attention and short convolution (LFM2)",
    "gemma3n": "layers that share KV (Gemma-3n)",
    "gemma4": "heads of two sizes (Gemma-4)",
    "fp8_cache": "fp8 KV cache",
}
"""Of docs/compatibility.md, by kind."""

# A decoder that embeds, with tokenizer since upstream's pooling wants one.
EMBEDDING = Kind(
    KINDS["qwen3"].config,
    ["FullAttentionSpec"],
    {"runner": "pooling", "skip_tokenizer_init": False},
    workloads=["embeddings"],
    control="corrupt_embeddings",
)

IMAGE_TOKEN = VOCAB_SIZE
"""Stands for a part of an image in a prompt. No text has it."""
IMAGE_SIZE, IMAGE_TOKENS = 56, 64

# Other architectures want torchvision, of which there is none for this build.
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGES = Kind(
    {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "image_token_index": IMAGE_TOKEN,
        "num_query_tokens": IMAGE_TOKENS,
        "text_config": LLAMA | {"vocab_size": VOCAB_SIZE + 64},
        "vision_config": _TOWER
        | {
            "model_type": "blip_2_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": 14,
        },
        "qformer_config": _TOWER
        | {
            "model_type": "blip_2_qformer",
            "encoder_hidden_size": 64,
            "cross_attention_frequency": 2,
            "vocab_size": 64,
        },
        "torch_dtype": "float32",
    },
    ["FullAttentionSpec"],
    {"skip_tokenizer_init": False},
    workloads=["images"],
    control="corrupt_images",
    files={
        "processor_config.json": {
            "processor_class": "Blip2Processor",
            "image_token": "<image>",
            "num_query_tokens": IMAGE_TOKENS,
        },
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor",
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        },
    },
    special_tokens=["<image>"],
)
