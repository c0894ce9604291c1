# SPDX-License-Identifier: Apache-2.0
"""Names of metrics, and what Prometheus' own tool says of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian's package prometheus has it)",
)


def promtool(*args: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool on files, or on what is `given` as its input."""
    return subprocess.run(
        ["promtool", *args], input=given, capture_output=True, text=True, timeout=120
    )


def lint(page: str) -> list[str]:
    """What promtool has against the tier's metrics on a page of /metrics.

    The colon of "vllm:" is upstream's, which begins the names of all its metrics so.
    """
    run = promtool("check", "metrics", given=page.replace("vllm:", "vllm_"))
    return [line for line in run.stderr.splitlines() if "kv_tier" in line]


def asked(text: str) -> set[str]:
    """Names of vLLM's metrics in a text; "vllm:kv_tier_*" is none."""
    return set(re.findall(r"vllm:\w*[a-z]\b(?!\*)", text))
