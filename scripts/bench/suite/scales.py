# SPDX-License-Identifier: Apache-2.0
"""How large the model, the caches and the workloads of a run are."""

from dataclasses import dataclass, field, replace

from .closed_loop import ClosedLoop
from .open_loop import OpenLoop
from .prefixes import Below, Latency
from .workloads import Interfere, NoReuse, Sessions, Trace

Workload = (
    Latency | Below | Sessions | NoReuse | Trace | ClosedLoop | OpenLoop | Interfere
)


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        device_bytes: of the device cache.
        host_gib: of host memory.
        block_size: tokens of a block; None for the platform's default.
        eager: no compilation and no graphs.

    """

    shape: str
    dtype: str
    device_bytes: int
    host_gib: float
    block_size: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eager: bool
    workloads: dict[str, Workload] = field(default_factory=dict)


# 2.5 times the device cache, of which 99% is asked for again.
AGENT = Sessions(6, 5, (24576, 29696), 256, 32, True, name="agent")
TINY_AGENT = Sessions(6, 4, (1024, 1536), 64, 8, True, name="agent")
# Contexts that take turns and outgrow the device cache three to four times. Of those
# that run at once, four have room in it, eight are 1.3 to 1.5 times as large as it.
ROTATE = Sessions(24, 4, (10000, 12000), 250, 48, True, at_once=4, name="rotate")
TINY_ROTATE = Sessions(12, 3, (1024, 1280), 64, 8, True, at_once=2, name="rotate")
# Of Mooncake's conversation trace: 4 to 5 times the device cache together, and what
# eight clients talk about at a time 1.6 times.
CLOSED = ClosedLoop(8, 24, name="closed_8")
TINY_CLOSED = ClosedLoop(8, 20, shrink=16, turns=(2, 4), output=8, name="closed_8")
SCALES = {
    "h200": Scale(
        shape="llama-3.1-8b",
        dtype="bfloat16",
        device_bytes=8 << 30,
        host_gib=48,
        block_size=None,
        max_model_len=36864,
        max_num_seqs=64,
        # What `vllm serve` takes on this GPU.
        max_num_batched_tokens=8192,
        eager=False,
        workloads={
            "latency": Latency((512, 1024, 2048, 4096, 8192, 16384, 32768)),
            "below": Below((1024, 4096, 16384)),
            # 3.1 times the device cache.
            "multiturn": Sessions(28, 3, (4096, 8192), 512, 64),
            "agent": AGENT,
            "agent_tools": replace(
                AGENT, think_s=0.5, prewarm_s=0.15, name="agent_tools"
            ),
            "rotate": ROTATE,
            "overfull": replace(ROTATE, at_once=8, name="overfull"),
            "closed_8": CLOSED,
            "closed_16": replace(CLOSED, clients=16, name="closed_16"),
            "goodput": OpenLoop((3, 4, 5, 6), 10, 40, think_s=10),
            "no_reuse": NoReuse(72, 4096, 64),
            # 0.8 times the device cache.
            "fits": Sessions(12, 12, (1024, 1024), 256, 96, name="fits"),
            "trace": Trace(one_of=40, shrink=8, seconds=10),
            "interfere": Interfere(32, 64, 1350, 16384, 6, 3),
        },
    ),
    "tiny": Scale(
        shape="tiny",
        dtype="float32",
        device_bytes=4096 * 2048,
        host_gib=0.0625,
        block_size=32,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        eager=True,
        workloads={
            "latency": Latency((128, 512, 1024), pause_s=0.05),
            "below": Below((128, 512, 1024), pause_s=0.05, settle_s=0.05),
            "multiturn": Sessions(12, 3, (512, 1024), 64, 16),
            "agent": TINY_AGENT,
            "agent_tools": replace(
                TINY_AGENT, think_s=0.1, prewarm_s=0.03, name="agent_tools"
            ),
            "rotate": TINY_ROTATE,
            "overfull": replace(TINY_ROTATE, at_once=4, name="overfull"),
            "closed_8": TINY_CLOSED,
            "closed_16": replace(TINY_CLOSED, clients=16, name="closed_16"),
            "goodput": OpenLoop((1, 2), 6, 3, 16, (2, 4), 400, 1, 2, 64),
            "no_reuse": NoReuse(16, 512, 16),
            "fits": Sessions(4, 4, (256, 256), 64, 24, name="fits"),
            "trace": Trace(one_of=200, shrink=16, seconds=4, max_output=16, limit=40),
            "interfere": Interfere(
                8, 32, 400, 1024, 2, 1, 32, spacing_s=0.2, after_s=0.1
            ),
        },
    ),
}
