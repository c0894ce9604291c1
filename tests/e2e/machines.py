# SPDX-License-Identifier: Apache-2.0
"""A second machine, as far as vLLM can tell: network, name and IPC of its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE, THERE = "198.18.77.1", "198.18.77.2"
"""Addresses on the cable, of a range that RFC 2544 has set aside for tests."""


def why_not() -> str:
    """Why this machine cannot play two; nothing if it can."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        return "needs root, ip (iproute2) and unshare (util-linux)"
    name = _names()[0]
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Machine:
    """The second one, with a cable to the first.

    Attributes:
        cable: The network device on this side, and on the other.

    """

    def __init__(self) -> None:
        self._name, *self.cable = _names()

    def start(
        self, command: Sequence[str], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start `command` there. The process has a session of its own, here."""
        enter = ["ip", "netns", "exec", self._name, "unshare", "--uts", "--ipc"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self._name, *command]
        with log.open("w") as output:
            return subprocess.Popen(
                [*enter, *named],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def plug_in(self) -> None:
        here, there = self.cable
        _ip("netns", "add", self._name)
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", self._name)
        _ip("addr", "add", f"{HERE}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", self._name, "addr", "add", f"{THERE}/30", "dev", there)
        for device in (there, "lo"):
            _ip("-n", self._name, "link", "set", device, "up")

    def take_away(self) -> None:
        # The cable goes with either end, once nobody uses it any more.
        for gone in (["link", "del", self.cable[0]], ["netns", "del", self._name]):
            subprocess.run(["ip", *gone], capture_output=True)


@contextmanager
def second_machine() -> Iterator[Machine]:
    machine = Machine()
    try:
        machine.plug_in()
        yield machine
    finally:
        machine.take_away()


def _names() -> tuple[str, str, str]:
    # Devices have names of 15 letters at most.
    number = os.getpid()
    return f"kvtier-{number}", f"kvt{number}a", f"kvt{number}b"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)
