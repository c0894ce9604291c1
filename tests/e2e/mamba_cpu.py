# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 with prefix caching on the CPU engine, in float32.

Upstream has a prefill hand out the state at a block boundary in its middle, but
its CPU kernel returns only the last one: every prompt raises IndexError. Without
that the scheduler ends a step of the prefill at the boundary, as it does for
other kinds of Mamba layers.

Older releases pack the weights of convolutions wherever the CPU has AMX tiles, of
float32 too, for which their kernel knows nothing.
"""

from dataclasses import fields, replace
from typing import Any


def end_prefill_steps_at_blocks() -> None:
    """Let Mamba-2 layers of engines made in this process checkpoint nothing."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    upstream = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec: Any = upstream(self, vllm_config)
        # Older releases end the steps there anyway.
        known = spec and {field.name for field in fields(spec)}
        if not known or "num_prefill_checkpoint_blocks" not in known:
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec  # type: ignore[method-assign]


def pack_no_weights() -> None:
    """Let convolutions of engines made in this process run as on CPUs without AMX."""
    from vllm import _custom_ops

    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):
        del _custom_ops.causal_conv1d_weight_pack
