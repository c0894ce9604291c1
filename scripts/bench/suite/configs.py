# SPDX-License-Identifier: Apache-2.0
"""What is compared: arguments and environment of the engine."""

import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Config:
    """One way to run the engine.

    Attributes:
        llm: arguments of `AsyncEngineArgs`, beyond those of the scale.
        env: environment variables of the process.
        device_scale: device cache in units of the scale's.
        jitter_s: every request is sent up to this much later than it could be.
        hints: conversations tell the tier of themselves (docs/hints.md).
        needs: a module without which the configuration cannot run.
        resets: whether upstream's reset of the caches empties all that it has.

    """

    llm: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    device_scale: int = 1
    jitter_s: float = 0.0
    hints: bool = False
    needs: str = ""
    resets: bool = True

    @property
    def family(self) -> str:
        """`core`, `connector` or `plain` (no host memory)."""
        if self.llm.get("kv_offloading_backend") == "core":
            return "core"
        offloads = "kv_offloading_backend" in self.llm
        return "connector" if offloads or "kv_transfer_config" in self.llm else "plain"

    @property
    def missing(self) -> str:
        """Why the module that it needs is not there, and what helps; empty if it is."""
        return _missing(self.needs) if self.needs else ""


@cache
def _missing(module: str) -> str:
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed: {INSTALL}"
    # In a process of its own: it may touch CUDA, and who forks must not have.
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{module} cannot be imported ({why}): {INSTALL}"


INSTALL = (
    "`pip install lmcache` for this Python and CUDA; docs/benchmarks.md has the lines "
    "for a machine without a network"
)
ALIASES = {
    "core": ["core-write_back"],
    "simple": ["simple-eager", "simple-lazy"],
}
"""Short names on the command line."""
ON_DISK = ("core-fs", "core-fs-threads", "offloading-fs")
"""These write files below the temporary folder: it must be on the disk to measure."""


def configs(
    host_gib: float, device_bytes: int, num_ranks: int = 1
) -> dict[str, Config]:
    """The configurations by name.

    Those that use host memory have `host_gib` of it, all `num_ranks` ranks of a replica
    together; those with files below no more than the device has, `device_bytes`.
    """
    folder = Path(tempfile.gettempdir()) / "kv-below"
    hashes = {"PYTHONHASHSEED": "0"}

    def core(**options: Any) -> dict[str, Any]:
        return {
            "kv_offloading_backend": "core",
            "kv_offloading_size": host_gib,
            "kv_offloading_config": options,
        }

    def native(**extra: Any) -> dict[str, Any]:
        settings = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {
            "kv_offloading_backend": "native",
            "kv_offloading_size": host_gib,
            "kv_transfer_config": settings,
        }

    files = {
        "type": "fs",
        "root_dir": f"{folder}/core",
        "max_gib": 4 * device_bytes / GIB,
        "debug": {"store_from_use": 1},
    }
    threads = {
        "root_dir": f"{folder}/threads",
        "debug": {"store_from_use": 1, "num_processes": 0, "num_threads": 8},
    }
    small = {"kv_offloading_size": device_bytes / GIB}
    theirs = native(
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=device_bytes,
        secondary_tiers=[{"type": "fs", "root_dir": f"{folder}/offloading"}],
    )
    simple = {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}
    return {
        "none": Config(),
        # Other batches for the same requests: how often does that flip a token?
        "none-jitter": Config(jitter_s=0.05),
        "large": Config(device_scale=6),
        "core-write_back": Config(core(debug={"store_policy": "write_back"})),
        "core-write_through": Config(core(debug={"store_policy": "write_through"})),
        "core-hints": Config(core(debug={"store_policy": "write_back"}), hints=True),
        "core-fs": Config(core(secondary_tiers=[files]) | small, hashes),
        # As before there were processes that read and write.
        "core-fs-threads": Config(
            core(secondary_tiers=[files | threads]) | small, hashes
        ),
        "offloading-fs": Config(theirs | small, hashes),
        "offloading": Config(native()),
        # A budget that every prefix of the workloads fits.
        "offloading-sync": Config(native(sync_load_budget_bytes=8 * GIB)),
        "simple-eager": Config(native(lazy_offload=False), simple),
        "simple-lazy": Config(native(lazy_offload=True), simple),
        "lmcache": _lmcache(host_gib / num_ranks),
    }


def _lmcache(gib: float) -> Config:
    """LMCache with so much host memory for each rank."""
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    settings = {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{gib:g}",
        "LMCACHE_CHUNK_SIZE": "256",
        # Its keys are Python hashes, which differ from process to process.
        "PYTHONHASHSEED": "0",
    }
    return Config(
        {"kv_transfer_config": connector}, settings, needs="lmcache", resets=False
    )
