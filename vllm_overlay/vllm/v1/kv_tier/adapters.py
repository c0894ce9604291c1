# SPDX-License-Identifier: Apache-2.0
"""From which load of a LoRA adapter the content of a block is.

Upstream's keys name an adapter by its name and path, and a reload from the same path
changes neither: what was computed before is served as if nothing had happened
(upstream issues 42125 and 53769). The device forgets it soon; the host would not.
With the tier, keys count the loads. With a tier below it, which outlives this process
and its numbers, they name the content.
"""

import itertools
import os
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_Hasher = TypeVar("_Hasher", bound=Callable[..., Any])


class Load(NamedTuple):
    """What tells a load of an adapter from others."""

    number: int
    """In this process. 0: the first under its name, or `content` says it all."""
    content: str = ""
    """Digest of the adapter's files, where other processes must know it again."""


class AdapterLoads:
    """Numbers the loads of all adapters of an engine.

    Requests keep the load with which they came, for all their blocks.

    Args:
        by_content: Other processes must know a load again, and by its bytes.

    """

    def __init__(self, by_content: bool = False) -> None:
        self._by_content = by_content
        self._numbers = itertools.count(1)
        # By name and id: under a new id workers load an adapter anew.
        self._current: dict[tuple[str, int], Load] = {}
        self._names: set[str] = set()
        self._files: dict[tuple[str, int], Hashable] = {}
        self._of_request: WeakKeyDictionary[Request, Load] = WeakKeyDictionary()

    def load(self, lora: "LoRARequest") -> None:
        """Workers are about to load `lora`, if it is new or replaces itself."""
        key = (lora.lora_name, lora.lora_int_id)
        is_first = lora.lora_name not in self._names
        if is_first and not _replaces(lora):
            # As without a tier.
            self._current[key] = self._load(lora, 0)
        elif _replaces(lora) or key not in self._current:
            self._current[key] = self._load(lora, next(self._numbers))
        self._names.add(lora.lora_name)
        self._files[key] = _files(lora.lora_path)

    def _load(self, lora: "LoRARequest", number: int) -> "Load":
        if not self._by_content:
            return Load(number)
        content = _content(lora.lora_path)
        if content is not None:
            return Load(0, content)
        # Nobody else must take it for theirs.
        return Load(number, os.urandom(16).hex())

    def unload(self, number: int) -> None:
        """Workers drop the adapter with this id, and read its files when it is back."""
        for key in [key for key in self._current if key[1] == number]:
            del self._current[key]

    def of(self, request: "Request") -> "Load":
        """The load whose weights `request` runs with."""
        load = self._of_request.get(request)
        if load is None:
            lora = request.lora_request
            assert lora is not None
            key = (lora.lora_name, lora.lora_int_id)
            # Workers reload an adapter for each step of such a request. Servers go
            # on sending it after a reload.
            replaced = _replaces(lora) and (
                key not in self._files
                or self._files[key] is None
                or self._files[key] != _files(lora.lora_path)
            )
            if replaced or key not in self._current:
                self.load(lora)
            load = self._of_request[request] = self._current[key]
        return load


def _replaces(lora: "LoRARequest") -> bool:
    """Whether workers load the adapter even if they have it, where they can."""
    return getattr(lora, "load_inplace", False)


def _files(path: str) -> Hashable:
    """What tells whether the files of an adapter have changed; None if nothing does."""
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return None
    return path, *sorted((n, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in entries)


def _content(path: str) -> str | None:
    """A digest of the names and of all bytes of an adapter's files; None: they are not
    to be seen here."""
    from blake3 import blake3

    digest = blake3()
    try:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_file():
                digest.update(f"{entry.name}/{entry.stat().st_size}/".encode())
                digest.update_mmap(entry.path)
    except OSError:
        return None
    return digest.hexdigest(16)


_starting: AdapterLoads | None = None
"""Of the engine whose block hasher is made next."""

_of_hashers: WeakKeyDictionary[Any, AdapterLoads] = WeakKeyDictionary()
"""By block hasher, of which each engine has one: a process may run several engines."""


def set_adapter_loads(loads: AdapterLoads | None, hasher: Any = None) -> None:
    """Count loads in the engine with this block hasher; without one, in the engine that
    starts. None: its keys are upstream's."""
    global _starting
    if hasher is None:
        _starting = loads
    elif loads is not None:
        _of_hashers[hasher] = loads
    else:
        _of_hashers.pop(hasher, None)


def with_adapter_loads(hasher: _Hasher) -> _Hasher:
    """The block hasher of the engine that starts; its requests' keys have what
    upstream's lack, if the engine has a tier."""
    set_adapter_loads(_starting, hasher)
    return hasher


def note_adapter_load(lora: "LoRARequest", hasher: Any = None) -> None:
    """Called before workers are told to load an adapter, with the block hasher of the
    engine; without one it is the engine that started last."""
    if (loads := _starting if hasher is None else _of_hashers.get(hasher)) is not None:
        loads.load(lora)


def note_adapter_unload(number: int, hasher: Any = None) -> None:
    """Called before workers are told to drop the adapter with this id."""
    if (loads := _starting if hasher is None else _of_hashers.get(hasher)) is not None:
        loads.unload(number)


def loads_of(request: "Request") -> AdapterLoads | None:
    """Of the engine that runs `request`; None without a tier."""
    hasher = getattr(request, "_block_hasher", None)
    if hasher is None:
        # Older releases bind it.
        hasher = getattr(
            getattr(request, "get_hash_new_full_blocks", None), "func", None
        )
    return None if hasher is None else _of_hashers.get(hasher)


def salt_key(request: "Request", salt: str) -> str | tuple[str, str]:
    """What a block's key has of a cache salt, where upstream's has the bare salt, and
    would take it for the adapter of that name (upstream issue 44701)."""
    return salt if loads_of(request) is None else ("cache_salt", salt)


def adapter_load_keys(request: "Request") -> list[tuple[str, str, str]]:
    """What a block's key must have beside name and path of the request's adapter."""
    if (loads := loads_of(request)) is None:
        return []
    load = loads.of(request)
    assert request.lora_request is not None
    name = request.lora_request.lora_name
    keys = [("lora load", name, str(load.number))] if load.number else []
    return [*keys, ("lora content", name, load.content)] if load.content else keys
