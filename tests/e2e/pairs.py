# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server with NixlConnector between them."""

import json
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.suite.engines import TRANSFER

from .conftest import environment
from .engine import Answer
from .installed import installed
from .server import Server
from .test_http import server_environment
from .test_parallel import answer_of

LEASE_S = 12
"""How long a prefill server keeps blocks for a decode server that does not ask."""
ASK = {"ignore_eos": True, "logprobs": 5, "return_tokens_as_token_ids": True}


def transfer(role: str) -> list[str]:
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    return ["--kv-transfer-config", json.dumps(config)]


class Pair:
    """Both servers, and the proxy in front of them.

    Args:
        model: That both serve.
        prefill: Flags of the prefill server.
        decode: Flags of the decode server.
        folder: For the logs.

    Raises:
        RuntimeError: One of them did not start.

    """

    def __init__(
        self, model: Path, prefill: Sequence[str], decode: Sequence[str], folder: Path
    ) -> None:
        starts: list[Callable[[], Server]] = []
        roles = {"kv_producer": prefill, "kv_consumer": decode}
        for role, flags in roles.items():
            env = server_environment() | _environment(_free_port())
            all_flags, log = [*flags, *transfer(role)], folder / role
            starts.append(
                lambda f=all_flags, e=env, g=log: Server(model, f, e, g)  # type: ignore[misc]
            )
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(start) for start in starts]
        servers = [s.result() for s in started if not s.exception()]
        for start in started:
            if error := start.exception():
                for server in servers:
                    server.kill()
                raise error
        self.prefill, self.decode = self.servers = servers

    def ask(self, prompt: list[int], max_tokens: int = 8, **hints: Any) -> Answer:
        """One answer, by way of both; `hints` are those of the tier."""
        return self.continue_(prompt, self.begin(prompt, **hints), max_tokens, **hints)

    def begin(self, prompt: list[int], **hints: Any) -> dict[str, Any]:
        """Let the prompt be computed; what the decode server needs to get its KV."""
        params = TRANSFER | _beside(hints)
        answer = self.prefill.complete(prompt, max_tokens=1, kv_transfer_params=params)
        return answer["kv_transfer_params"]

    def continue_(
        self,
        prompt: list[int],
        params: dict[str, Any],
        max_tokens: int = 8,
        **hints: Any,
    ) -> Answer:
        """The answer of the decode server to a prompt that the other one computed."""
        params = params | _beside(hints)
        return answer_of(
            self.decode.complete(
                prompt, max_tokens=max_tokens, kv_transfer_params=params, **ASK
            )
        )

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


def _beside(hints: dict[str, Any]) -> dict[str, Any]:
    return {"kv_tier": hints} if hints else {}


def _environment(port: int) -> dict[str, str]:
    """Of a server whose connector is reached at `port`."""
    found = environment(PYTHONPATH=installed("nixl"))
    return {
        "PYTHONPATH": found["PYTHONPATH"],
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_SERVER_DEV_MODE": "1",
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
