# SPDX-License-Identifier: Apache-2.0
"""Names of upstream that have moved between the releases."""

from typing import Any

try:
    from vllm.config.cache import KVOffloadingBackend
except ModuleNotFoundError:
    from vllm.config import (  # type: ignore[attr-defined, no-redef]
        KVOffloadingBackend,
    )
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.hashing import get_hash_fn_by_name, sha256
    from vllm.utils.math_utils import cdiv
    from vllm.v1.worker.worker_base import WorkerWrapperBase
except ImportError:
    from vllm.utils import (  # type: ignore[attr-defined, no-redef]
        FlexibleArgumentParser,
        cdiv,
        sha256,
    )
    from vllm.worker.worker_base import (  # type: ignore[import-not-found, no-redef]
        WorkerWrapperBase,
    )

    try:
        from vllm.utils import (  # type: ignore[attr-defined, no-redef]
            get_hash_fn_by_name,
        )
    except ImportError:
        get_hash_fn_by_name = {"builtin": hash, "sha256": sha256}.__getitem__

try:
    from vllm.model_executor.layers.attention.attention import (
        get_attention_context as touch_kv_layer,
    )
except ImportError:
    from vllm.attention.layer import (  # type: ignore[import-not-found, no-redef]
        wait_for_kv_layer_from_connector as touch_kv_layer,
    )


def init_none_hash(hash_function: Any) -> None:
    """Choose the hash before the first block; some releases do when imported."""
    init = getattr(kv_cache_utils, "init_none_hash", None)
    if init is not None:
        init(hash_function)


def block_hash(data: bytes) -> BlockHash:
    """A hash that is told from others by `data`."""
    if hasattr(BlockHash, "hash_value"):
        # The first releases have the tokens beside a number.
        make: Any = BlockHash
        return make(int.from_bytes(data, "big"), ())
    return BlockHash(data)


__all__ = [
    "FlexibleArgumentParser",
    "KVOffloadingBackend",
    "WorkerWrapperBase",
    "block_hash",
    "cdiv",
    "get_hash_fn_by_name",
    "init_none_hash",
    "sha256",
    "touch_kv_layer",
]
