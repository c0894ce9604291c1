# SPDX-License-Identifier: Apache-2.0
"""Faults of stores below the host, all the time: of files, and of a Valkey server."""

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.stores.servers import Valkey

EVERY_S = 0.2


class Faults:
    """A directory and a server below the host, and a thread that harms both.

    Args:
        folder: Where the directory is made.
        seed: Of what happens when.

    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._root = folder / "kv"
        self._rng = random.Random(seed)
        self._valkey = Valkey()
        self._valkey.start()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Of `secondary_tiers`."""
        more = {"debug": {"store_from_use": 1}}
        # Room for a part, so that files are evicted, too.
        files = {"type": "fs", "root_dir": str(self._root), "max_gib": 0.03}
        return [files | more, self._valkey.entry | more]

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self._valkey.close()

    def _run(self) -> None:
        harms = [self._flip, self._cut, self._delete, self._swap, self._forbid]
        harms = 6 * harms + [self._forget, self._stand_still, self._die]
        while not self._ends.wait(self._rng.uniform(0, 2 * EVERY_S)):
            harm = self._rng.choice(harms)
            try:
                harm()
            except OSError:
                # The engine has removed the file meanwhile.
                continue
            self.counts[harm.__name__.strip("_")] += 1

    # ------------------------------------------------------------------- files

    def _file(self) -> Path:
        files = sorted(self._root.rglob("*.kv"))
        if not files:
            raise FileNotFoundError
        return self._rng.choice(files)

    def _flip(self) -> None:
        """One bit."""
        with self._file().open("r+b") as file:
            size = file.seek(0, 2)
            place = self._rng.randrange(size)
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    def _cut(self) -> None:
        path = self._file()
        with path.open("r+b") as file:
            file.truncate(self._rng.randrange(path.stat().st_size))

    def _delete(self) -> None:
        self._file().unlink()

    def _swap(self) -> None:
        """The file of one block under the name of another one."""
        one, other = self._file(), self._file()
        one.rename(other)

    def _forbid(self) -> None:
        """Nobody but root reads it."""
        self._file().chmod(0)

    # ------------------------------------------------------------------ Valkey

    def _forget(self) -> None:
        self._valkey.client.flushall()

    def _stand_still(self) -> None:
        self._valkey.send("server", signal.SIGSTOP)
        self._ends.wait(self._rng.uniform(0.1, 3))
        self._valkey.send("server", signal.SIGCONT)

    def _die(self) -> None:
        self._valkey.kill("server")
        time.sleep(self._rng.uniform(0, 1))
        self._valkey.start()
