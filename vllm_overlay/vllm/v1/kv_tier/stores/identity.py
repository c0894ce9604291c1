# SPDX-License-Identifier: Apache-2.0
"""What shaped the bytes of KV, as a short name.

Objects outlive engines, so whatever makes KV of the same tokens come out otherwise must
be in their name: left out, an engine would read what another one meant. Put in without
need, it costs a prefix that is computed once more. When in doubt it is in.
"""

import dataclasses
import enum
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_tier.stores.format import FORMAT_VERSION
from vllm.v1.kv_tier.stores.weights import weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SETTING = "--kv-offloading-config: secondary_tiers"
_DIGEST_BYTES = 16


def namespace(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", release: str
) -> str:
    """A name for all that shapes the bytes and is known to the scheduler's process.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's.
        release: Of vLLM, which may compute KV otherwise than another one.

    Returns:
        32 hex digits, the same in each process with these settings and weights.

    Raises:
        ValueError: Something that shapes the bytes, or their keys, cannot be known or
            differs from process to process. The message has the mend.

    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError(
            f"{_SETTING} cannot keep KV whose scales are calculated from the first "
            "request (calculate_kv_scales): each engine has others. Set it to false, "
            "or remove secondary_tiers."
        )
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    load_format = vllm_config.load_config.load_format
    return _digest(
        {
            "format": FORMAT_VERSION,
            "vllm": release,
            "model": _model(vllm_config.model_config, load_format),
            "speculative": speculative and getattr(speculative, "method", None),
            "draft": draft and _model(draft, load_format),
            # The adapters themselves are in the keys.
            "lora": getattr(vllm_config, "lora_config", None),
            "cache_dtype": cache.cache_dtype,
            "block_size": cache.block_size,
            "mamba": {k: v for k, v in vars(cache).items() if k.startswith("mamba_")},
            "groups": kv_cache_config.kv_cache_groups,
            "sizes": {
                name: getattr(parallel, f"{name}_parallel_size", 1)
                for name in (
                    "tensor",
                    "pipeline",
                    "decode_context",
                    "prefill_context",
                )
            },
            "hashes": _hash_seed(cache.prefix_caching_hash_algo),
        }
    )


def rank_namespace(namespace: str, rank: int, description: object) -> str:
    """A namespace with what only a rank knows: its layout, its attention backends."""
    return _digest([namespace, rank, description])


def _model(model: Any, load_format: Any) -> dict[str, Any]:
    config = model.hf_config.to_dict()
    # Where it was found, not what it is.
    config.pop("_name_or_path", None)
    return {
        "config": config,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "code_revision": getattr(model, "code_revision", None),
        # Some kinds of RoPE depend on it.
        "max_model_len": model.max_model_len,
        "weights": weights(model, load_format),
    }


def _hash_seed(algorithm: str) -> list[str]:
    """What NONE_HASH, the parent of first blocks, is made of.

    Upstream sets NONE_HASH itself only after the tier has started.
    """
    seed = os.getenv("PYTHONHASHSEED")
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is not None:
        # Random where it is another one each time. Releases without it draw always.
        from vllm.utils.hashing import get_hash_fn_by_name

        function = get_hash_fn_by_name(algorithm)
        first, second = resolve(function), resolve(function)
        seed = first if first == second else None
    # Python draws for that word, and v0.9.2 has an algorithm that hashes by Python.
    if seed is None or seed == "random":
        other = "" if resolve is None else ", or --prefix-caching-hash-algo sha256"
        raise ValueError(
            f"{_SETTING}: block hashes of --prefix-caching-hash-algo {algorithm} begin "
            "with a random number in each process, so nothing would ever be found "
            f"again. Set PYTHONHASHSEED=0 in the environment of all engines{other}."
        )
    return [algorithm, seed]


def _digest(value: Any) -> str:
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: Any) -> Any:
    """The value as JSON has it: no addresses, no order that is by chance."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, dict(_fields(value))]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(v), sort_keys=True) for v in value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        yield field.name, _plain(getattr(value, field.name))
