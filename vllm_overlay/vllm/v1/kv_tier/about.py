# SPDX-License-Identifier: Apache-2.0
"""Tells which tag, version and patches this build of vLLM has."""

import json
from pathlib import Path
from typing import Any

_BUILD_INFO = Path(__file__).with_name("build_info.json")


def about() -> dict[str, Any]:
    """Tag, version and patches of this build.

    Returns:
        `{"tag", "version", "device", "patches": [{"name", "sha256"}, ...],
        "overlay_sha256"}` as `make apply-patches` or `make wheel` wrote it.

    Raises:
        RuntimeError: The tree was not made by either of them.

    """
    if not _BUILD_INFO.exists():
        raise RuntimeError(
            f"{_BUILD_INFO.name} is missing in vllm/v1/kv_tier: this tree was not made "
            "by `make apply-patches` or `make wheel`. Use one of them."
        )
    return json.loads(_BUILD_INFO.read_text())


if __name__ == "__main__":
    print(json.dumps(about(), indent=2))
