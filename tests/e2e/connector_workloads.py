# SPDX-License-Identifier: Apache-2.0
"""Workloads for engines with a KV connector; on others a cache serves them."""

from typing import Any

import torch

from .engine import Engine
from .harm import break_copy, mend_copy
from .workloads import BLOCK, fill_device, text, workload

TURNS = [
    [text(2000 + i, 5 * BLOCK + 9 + 40 * turn) for i in range(8)] for turn in range(3)
]
"""Conversations by turn, the prompt of each with that of the turn before in front:
more than two small device caches hold."""


@workload
def passed_on(engine: Engine) -> dict[str, Any]:
    """What a prefill engine computes for a decode engine, here asked of one."""
    answers = [
        engine.generate([prompt], max_tokens=8)[0] for turn in TURNS for prompt in turn
    ]
    return {"answers": answers}


@workload
def handed_over(engine: Engine) -> dict[str, Any]:
    """Prompts whose KV a connector saves and loads again, with turns in between.

    For engines with a KV connector; on others a cache serves them.
    """
    # Not at a block's end: upstream's example connector subtracts the wrong way there.
    prompts = [text(950 + i, 4 * BLOCK + 9) for i in range(8)]
    answers = [engine.generate([p], max_tokens=8)[0] for p in prompts]
    # Found in the tier, and saved with what follows.
    prompts = [p + text(960 + i, 50) for i, p in enumerate(prompts)]
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    let_transfers_end(engine)
    was_reset = engine.reset()
    # Neither tier has anything: it comes from the connector.
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    external = engine.counters().get("external_prefix_cache_hits", 0)
    # Evicted since, so it comes from the host.
    prompts = [p + text(970 + i, 40) for i, p in enumerate(prompts)]
    answers += [engine.generate([p], max_tokens=8)[0] for p in prompts]
    # All at once, with others whose prefix only the connector may have.
    answers += engine.generate([p + text(980, 20) for p in prompts[:4]], max_tokens=40)
    let_transfers_end(engine)
    changed = engine.on_ranks(changed_while_sent)
    return {
        "answers": answers,
        "was_reset": was_reset,
        "external": external,
        "changed": changed,
    }


def let_transfers_end(engine: Engine) -> None:
    """Some steps with less than a block: a connector has nothing to send of it."""
    engine.generate([text(999, 5)], max_tokens=12)


def changed_while_sent(wrapper: Any) -> list[str]:
    from .connectors import CHANGED

    return CHANGED


@workload
def connector_spoils(engine: Engine) -> dict[str, Any]:
    """What the connector loads is wrong from now on. Asks what `handed_over` asks."""
    engine.on_ranks(spoil_external)
    return handed_over(engine)


def spoil_external(wrapper: Any) -> None:
    """Let every block that is loaded from a file be another one's."""
    import safetensors.torch

    for module, name in ((torch, "load"), (safetensors.torch, "load_file")):
        original = getattr(module, name)

        def load(path: Any, real: Any = original, **more: Any) -> Any:
            found = real(path, **more)
            if isinstance(found, list):
                return [data.roll(len(data) // 3 // 8 * 8) for data in found]
            return {key: data.roll(1, 0) for key, data in found.items()}

        setattr(module, name, load)


@workload
def external_load_fails(engine: Engine) -> dict[str, Any]:
    """Some blocks do not come. Asks what `handed_over` asks."""
    engine.on_ranks(fail_external_loads, 3)
    return handed_over(engine)


def fail_external_loads(wrapper: Any, number: int) -> None:
    from .connectors import SlowConnector

    SlowConnector.fail_loads = number


@workload
def tier_load_fails_beside_a_connector(engine: Engine) -> dict[str, Any]:
    """A load of the tier fails while the connector loads what follows it."""
    if engine.has_tier:
        engine.on_ranks(break_copy, "loads", 0)
    head, tail = text(990, 3 * BLOCK), text(991, 3 * BLOCK)
    answers = engine.generate([head + tail + text(992, 9)], max_tokens=4)
    let_transfers_end(engine)
    assert engine.reset()
    # Without a connector that knows it, from then on: the tier has the head only.
    answers += engine.generate([head + text(993, 9)], max_tokens=4)
    fill_device(engine)
    answers += engine.generate([head + tail + text(994, 20)], max_tokens=30)
    let_transfers_end(engine)
    failures = engine.on_ranks(mend_copy, "loads") if engine.has_tier else []
    return {"answers": answers, "failures": failures}
