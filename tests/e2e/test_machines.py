# SPDX-License-Identifier: Apache-2.0
"""One engine on two machines (`--nnodes 2`), each of which has a rank's host slots.

With `KV_TIER_PARALLEL=all` only. The second machine is made of namespaces: `machines`.
"""

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm.config import ParallelConfig
from vllm.v1.kv_tier.memory.limits import available_host_bytes

from .compare import assert_same_answers
from .conftest import Results
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, WITH_RANKS, GiB
from .machines import HERE, THERE, Machine, second_machine, why_not
from .model import make_tokenizer
from .server import Server, command
from .test_http import CORE, NUM_SLOTS, SERVE, SIZE, server_environment
from .test_parallel import HIT, SPOIL, ask

HAS_NODES = hasattr(ParallelConfig, "nnodes")
pytestmark = [
    WITH_RANKS,
    pytest.mark.skipif(not HAS_NODES, reason="this release wants Ray for that"),
]
TWO = ["-tp", "2", "--distributed-executor-backend", "mp", "--nnodes", "2"]
MEET = ["--master-addr", HERE, "--master-port"]
PORT = 29477


class Node(NamedTuple):
    """What runs on the second machine."""

    process: subprocess.Popen[bytes]
    log: Path


def environment_on(address: str, device: str) -> dict[str, str]:
    """Of a server, with the network device that leads to the other machine."""
    cable = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": device}
    return server_environment() | cable | {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    if reason := why_not():
        pytest.skip(reason)
    with second_machine() as machine:
        yield machine


def start_there(machine: Machine, model: Path, flags: list[str], log: Path) -> Node:
    env = environment_on(THERE, machine.cable[1])
    there = [*flags, "--node-rank", "1", "--headless"]
    return Node(machine.start(command(model, *there), env, log), log)


def end(node: Node) -> None:
    os.killpg(node.process.pid, signal.SIGKILL)
    node.process.wait()


@pytest.fixture(scope="module")
def two(
    machine: Machine, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Node]]:
    """An engine with a rank on each machine."""
    make_tokenizer(llama)
    folder = tmp_path_factory.mktemp("machines")
    flags = [*SERVE, *CORE, *SIZE, *SPOIL, *TWO, *MEET, str(PORT)]
    node = start_there(machine, llama, flags, folder / "there")
    env = environment_on(HERE, machine.cable[0])
    try:
        server = Server(llama, [*flags, "--node-rank", "0"], env, folder / "log")
        yield server, node
        server.kill()
    finally:
        end(node)


@pytest.mark.engines("large")
@pytest.mark.compat("engine modes", "TP=2, two machines")
def test_ranks_on_two_machines(results: Results, two: tuple[Server, Node]) -> None:
    server, node = two
    expected = results("large")["workloads"]["served"]["answers"]
    first, second = ask(server), ask(server)
    assert_same_answers(first, expected)
    assert_same_answers(second, expected)
    assert not any(answer["cached_tokens"] for answer in first)
    assert sum(answer["cached_tokens"] for answer in second) == HIT
    found = server.metrics("vllm:kv_tier_")
    # The size is that of all ranks together, wherever they are.
    assert found["vllm:kv_tier_host_slots"] == NUM_SLOTS
    assert found["vllm:kv_tier_slot_bytes"] == BLOCK_BYTES
    assert found["vllm:kv_tier_loaded_blocks_total"] == HIT / BLOCK_TOKENS
    own = f"KV tier: {NUM_SLOTS} host slots of {BLOCK_BYTES // 2} bytes"
    assert server.log().count(own) == node.log.read_text().count(own) == 1


@pytest.mark.engines("large")
def test_a_slot_on_the_second_machine_is_noticed(
    results: Results, two: tuple[Server, Node]
) -> None:
    """The negative control: what is loaded there is a part of every answer."""
    server, _ = two
    expected = results("large")["workloads"]["served"]["answers"]
    assert_same_answers(ask(server), expected)
    server.post("/collective_rpc", {"method": "spoil_slots_of_rank", "args": [1]})
    with pytest.raises(AssertionError, match="other tokens|off by"):
        assert_same_answers(ask(server), expected)


@pytest.mark.compat("refused at start", "two machines: what does not fit one of them")
def test_a_size_that_one_machine_lacks(
    machine: Machine, llama: Path, tmp_path: Path
) -> None:
    """Each machine is asked for its own rank's half, and has less."""
    size = f"{2.4 * available_host_bytes() / GiB:.1f}"
    flags = [*SERVE, *CORE, "--kv-offloading-size", size, *TWO, *MEET, str(PORT + 1)]
    node = start_there(machine, llama, flags, tmp_path / "there")
    try:
        found = subprocess.run(
            command(llama, *flags, "--node-rank", "0", "--port", "0"),
            env=environment_on(HERE, machine.cable[0]),
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        end(node)
    output = found.stderr + found.stdout
    assert found.returncode != 0
    assert f"--kv-offloading-size {size.removesuffix('.0')} does not fit" in output
    assert f"1 of the 2 ranks run on {platform.node()} and take" in output
