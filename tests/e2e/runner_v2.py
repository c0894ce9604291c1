# SPDX-License-Identifier: Apache-2.0
"""The driver with model runner V2: `python -m tests.e2e.runner_v2 JOB RESULT`.

Upstream has that runner for CPUs where Triton has a backend for them. Triton's
interpreter runs its kernels as well, slowly.
"""

import os
from importlib.util import find_spec
from runpy import run_module
from types import SimpleNamespace

HAS_TRITON = find_spec("triton") is not None


def choose_v2() -> None:
    """Let engines of this process have the runner. vLLM is not imported yet."""
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None)


if __name__ == "__main__":
    choose_v2()
    run_module("tests.e2e.driver", run_name="__main__")
