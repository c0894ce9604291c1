# SPDX-License-Identifier: Apache-2.0
"""Names of upstream that have moved between the releases."""

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.hashing import get_hash_fn_by_name, sha256
    from vllm.utils.math_utils import cdiv
    from vllm.v1.worker.worker_base import WorkerWrapperBase
except ImportError:
    from vllm.utils import (  # type: ignore[attr-defined, no-redef]
        FlexibleArgumentParser,
        cdiv,
        get_hash_fn_by_name,
        sha256,
    )
    from vllm.worker.worker_base import (  # type: ignore[import-not-found, no-redef]
        WorkerWrapperBase,
    )

__all__ = [
    "FlexibleArgumentParser",
    "WorkerWrapperBase",
    "cdiv",
    "get_hash_fn_by_name",
    "sha256",
]
