# SPDX-License-Identifier: Apache-2.0
"""What keys of blocks must have in addition to upstream's: which load of a LoRA adapter
ran, and which positions of a prompt take embeddings.

Upstream's keys contain an adapter's name and path, which a reload from the same path
does not change, so blocks computed with the old weights are served (upstream issues
42125 and 53769). The device soon evicts them; the host would not. With the tier, keys
contain the number of the load. With a secondary tier or a pool, which outlive this
process and its numbers, they contain a digest of the adapter's files.

A prompt may mix token ids and embeddings. Upstream's keys contain the ids of all
positions (0 where there is none) and the bytes of all embeddings, but not which of them
a position takes, nor the type of the bytes. Keys of older releases lack the offset of
an image in its block.
"""

import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.bounded import BoundedMap, digest
from vllm.v1.kv_tier.releases import block_hasher, fields_of_adapter, reloads_in_place

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = init_logger(__name__)

_MAX_BYTES = 8 << 20
"""Bytes of memory about adapters, since clients may choose their names and number."""

_CHUNK_BYTES = 1 << 20

_NUM_CHECKS = 16
"""Steps for which files of an adapter are looked at after a request for it has come,
or has run."""

_NO_WEIGHTS = frozenset(
    {
        *("lora_name", "lora_int_id", "lora_path", "load_inplace"),
        # For the list of models that a server shows.
        "base_model_name",
    }
)
"""Fields of requests for adapters that do not say how files become weights. What a
later release adds counts until it is listed."""

_Hasher = TypeVar("_Hasher", bound=Callable[..., Any])
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Load(NamedTuple):
    """Distinguishes one load of an adapter from others."""

    number: int
    """Number in this process. 0 for the first load of a name, or if `content`
    suffices."""
    content: str = ""
    """Digest of the adapter's files, for keys that other processes must find; random if
    it is unknown which weights are loaded."""


class _Loaded(NamedTuple):
    """The adapter that workers have under an id."""

    name: str
    path: str
    options: str
    """What else shapes the weights, see `_options`."""
    load: Load
    files: Hashable
    """State of its files; None if they cannot be read here."""


_NOT_KNOWN = _Loaded("", "", "", Load(0), None)
"""No request's adapter, so that each request has keys of its own."""


class AdapterLoads:
    """Numbers the loads of all adapters of an engine.

    A request keeps the load with which it came for all of its blocks, unless its
    adapter is reloaded meanwhile. Then its KV mixes both weights, and it gets keys that
    no other request has. So does a request whose adapter's files have changed without a
    reload: workers use the old weights until they drop them, and read the new ones
    afterwards.

    Args:
        by_content: Identify loads by the adapter's files, for other processes.

    """

    def __init__(self, by_content: bool = False) -> None:
        self._by_content = by_content
        self._numbers = itertools.count(1)
        # By id, since workers load an adapter again under a new one.
        self._loaded: BoundedMap[int, _Loaded] = BoundedMap(_MAX_BYTES)
        # Digests of names that were loaded.
        self._names: BoundedMap[bytes, None] = BoundedMap(
            _MAX_BYTES, dropped=self._forget
        )
        self._has_forgotten = False
        # Adapters that ranks may read soon: how often their files are still looked at.
        self._recent: BoundedMap[int, int] = BoundedMap(_MAX_BYTES)
        self._of_request: WeakKeyDictionary[Request, Load] = WeakKeyDictionary()
        # Requests are created and hashed on another thread.
        self._lock = Lock()

    def load(self, lora: "LoRARequest") -> None:
        """Note that workers are about to load `lora`, if they do not have it."""
        with self._lock:
            if reloads_in_place(lora) or lora.lora_int_id not in self._loaded:
                self._load(lora)

    def unload(self, number: int) -> None:
        """Note that workers drop the adapter with this id."""
        with self._lock:
            self._loaded.pop(number, None)
            self._disown(number)

    @contextmanager
    def carried_out(self, number: int) -> Iterator[None]:
        """While workers load or drop the adapter with this id, after `load` or
        `unload`. If they fail, or its files change meanwhile, it is not known which
        weights they have: some ranks may have the old ones, and others the new ones."""
        is_known = False
        try:
            yield
            is_known = True
        finally:
            with self._lock:
                loaded = self._loaded.get(number)
                if loaded is not None:
                    is_known = is_known and loaded.files == _files(loaded.path)
                if not is_known:
                    self._loaded[number] = _NOT_KNOWN
                    # Also of those that came meanwhile.
                    self._disown(number)

    def of(self, request: "Request") -> Load:
        """The load whose weights `request` uses."""
        load = self._of_request.get(request)
        if load is None:
            lora = request.lora_request
            assert lora is not None
            with self._lock:
                load = self._of_request[request] = self._now(lora)
        return load

    def watch(self, number: int) -> None:
        """Look at the files of this adapter in the next calls of `check_files`: a
        request for it may run now."""
        with self._lock:
            self._recent[number] = _NUM_CHECKS

    def check_files(self, numbers: Iterable[int]) -> bool:
        """Whether files of adapters are no longer those that keys name.

        Ranks may have read them since the keys were made: for their first step, or
        because they had dropped the adapter. Requests under way, and those that come,
        have keys of their own then.

        Args:
            numbers: Ids of the adapters of requests that run. Those of requests that
                came or were watched lately count, too.

        """
        with self._lock:
            self._recent.update(dict.fromkeys(numbers, _NUM_CHECKS))
            changed = False
            for number, num_left in list(self._recent.items()):
                if num_left > 1:
                    self._recent[number] = num_left - 1
                else:
                    del self._recent[number]
                loaded = self._loaded.get(number, _NOT_KNOWN)
                if loaded is _NOT_KNOWN or loaded.files == _files(loaded.path):
                    continue
                self._loaded[number] = _NOT_KNOWN
                self._disown(number)
                changed = True
        return changed

    def _now(self, lora: "LoRARequest") -> Load:
        """The load for a new request with this adapter."""
        self._recent[lora.lora_int_id] = _NUM_CHECKS
        loaded = self._loaded.use(lora.lora_int_id)
        if loaded is None:
            return self._load(lora)
        files = _files(lora.lora_path)
        unchanged = files == loaded.files
        if reloads_in_place(lora):
            # Workers reload the adapter for each step of such a request, and servers
            # keep sending the flag after a reload.
            is_same = unchanged and files and loaded.options == _options(lora)
            return loaded.load if is_same else self._load(lora)
        same = lora.lora_name, lora.lora_path, _options(lora)
        if unchanged and (loaded.name, loaded.path, loaded.options) == same:
            return loaded.load
        logger.warning_once(
            "KV tier: which weights the ranks have of LoRA adapter %s is not known, "
            "since its last load failed, its files have changed, or its id has another "
            "adapter: its requests share no KV until it is loaded again in place.",
            lora.lora_name,
        )
        return _unknown()

    def _load(self, lora: "LoRARequest") -> Load:
        number, name = lora.lora_int_id, digest(lora.lora_name)
        self._disown(number)
        is_first = not (
            reloads_in_place(lora) or name in self._names or self._has_forgotten
        )
        self._names[name] = None
        # 0 gives the same key as without a tier.
        load = Load(0 if is_first else next(self._numbers))
        files, options = _files(lora.lora_path), _options(lora)
        if self._by_content:
            content = _content(lora.lora_path)
            if fields_of_adapter(lora).get("tensorizer_config_dict"):
                # The weights lie elsewhere.
                content = None
            if content is None or files != _files(lora.lora_path):
                # No other request may find this KV.
                load = Load(load.number, os.urandom(16).hex())
            else:
                load = Load(0, f"{content} {options}" if options else content)
        place = lora.lora_name, lora.lora_path
        self._loaded[number] = _Loaded(*place, options, load, files)
        return load

    def _disown(self, number: int) -> None:
        """Give new keys to running requests whose weights change.

        Blocks that they compute from now on mix old and new weights.
        """
        for request in list(self._of_request):
            lora = request.lora_request
            if lora is not None and lora.lora_int_id == number:
                self._of_request[request] = _unknown()
                _rename(request)

    def _forget(self, name: bytes, value: None) -> None:
        self._has_forgotten = True


def _unknown() -> Load:
    return Load(0, os.urandom(16).hex())


def _rename(request: "Request") -> None:
    """Give the blocks of a request keys that no other request has.

    Blocks that it has computed before stay cached under their old keys.
    """
    hashes: list[Any] = request.block_hashes
    hashes[:] = map(releases.random_block_hash, hashes)


def _options(lora: "LoRARequest") -> str:
    """What a request for an adapter says of how its files become weights."""
    said = {
        name: value
        for name, value in fields_of_adapter(lora).items()
        if value and name not in _NO_WEIGHTS
    }
    return repr(said) if said else ""


def _files(path: str) -> Hashable:
    """State of an adapter's files; None if they cannot be read."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return None
    return path, *sorted(
        (n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in found
    )


def _content(path: str) -> str | None:
    """Digest of an adapter's file names and bytes; None if they cannot be read here."""
    from blake3 import blake3

    made, chunk = blake3(), bytearray(_CHUNK_BYTES)
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            found = sorted((entry.name, entry.path) for entry in entries)
        for name, place in found:
            if not os.path.isfile(place):
                continue
            made.update(f"{name}/{os.path.getsize(place)}/".encode())
            # Not memory-mapped: if the file became shorter, this process would be
            # killed.
            with open(place, "rb", buffering=0) as file:
                while num_bytes := file.readinto(chunk):
                    made.update(memoryview(chunk)[:num_bytes])
    except OSError:
        return None
    return made.hexdigest(16)


_starting: AdapterLoads | None = None
"""Loads of the engine whose block hasher is made next."""

_of_hashers: WeakKeyDictionary[Any, AdapterLoads] = WeakKeyDictionary()
"""Loads by block hasher. Each engine has one, and a process may run several engines."""


def set_adapter_loads(loads: AdapterLoads | None, hasher: Any = None) -> None:
    """Count loads for the engine with this block hasher; None: for the next engine.

    Without `loads`, the engine uses upstream's keys.
    """
    global _starting
    if hasher is None:
        _starting = loads
    elif loads is not None:
        _of_hashers[hasher] = loads
    else:
        _of_hashers.pop(hasher, None)


def with_adapter_loads(hasher: _Hasher) -> _Hasher:
    """Register the block hasher of the engine that starts, and return it."""
    set_adapter_loads(_starting, hasher)
    return hasher


def note_adapter_load(
    lora: "LoRARequest", hasher: Any = None
) -> AbstractContextManager[None]:
    """Note that workers are about to load an adapter, in the context that is returned.

    Args:
        lora: The request for the adapter.
        hasher: Block hasher of the engine; None for the engine that started last.

    """
    if (loads := _starting if hasher is None else _of_hashers.get(hasher)) is None:
        return nullcontext()
    loads.load(lora)
    return loads.carried_out(lora.lora_int_id)


def note_adapter_unload(
    number: int, hasher: Any = None
) -> AbstractContextManager[None]:
    """As `note_adapter_load`, before workers drop the adapter with this id."""
    if (loads := _starting if hasher is None else _of_hashers.get(hasher)) is None:
        return nullcontext()
    loads.unload(number)
    return loads.carried_out(number)


def notes_adapter_load(add_lora: _Method) -> _Method:
    """For `EngineCore.add_lora`."""

    @functools.wraps(add_lora)
    def noted(engine: Any, lora_request: "LoRARequest") -> Any:
        with note_adapter_load(lora_request, engine.request_block_hasher):
            return add_lora(engine, lora_request)

    return noted  # type: ignore[return-value]


def notes_adapter_unload(remove_lora: _Method) -> _Method:
    """For `EngineCore.remove_lora`."""

    @functools.wraps(remove_lora)
    def noted(engine: Any, lora_id: int) -> Any:
        with note_adapter_unload(lora_id, engine.request_block_hasher):
            return remove_lora(engine, lora_id)

    return noted  # type: ignore[return-value]


def loads_of(request: "Request") -> AdapterLoads | None:
    """Loads of the engine that runs `request`; None without a tier."""
    hasher = block_hasher(request)
    return None if hasher is None else _of_hashers.get(hasher)


def salt_key(request: "Request", salt: str) -> str | tuple[str, str]:
    """The part of a block's key for a cache salt.

    Upstream uses the bare salt, which can equal an adapter's name (upstream issue
    44701).
    """
    return salt if loads_of(request) is None else ("cache_salt", salt)


def adapter_load_keys(request: "Request") -> list[tuple[str, str, str]]:
    """Parts of a block's key in addition to name and path of the request's adapter."""
    if (loads := loads_of(request)) is None:
        return []
    load = loads.of(request)
    assert request.lora_request is not None
    name = request.lora_request.lora_name
    keys = [("lora load", name, str(load.number))] if load.number else []
    return [*keys, ("lora content", name, load.content)] if load.content else keys


def embeds_keys(request: "Request", start: int, end: int) -> list[tuple[str, str]]:
    """Additional parts of the key of a block of a request with embeddings.

    Args:
        request: A request with `prompt_embeds`.
        start: First position of the block.
        end: Position after its last one.

    """
    if loads_of(request) is None:
        return []
    assert request.prompt_embeds is not None
    takes_ids = releases.token_id_mask(request)
    if takes_ids is not None:
        where = "".join("01"[bool(is_id)] for is_id in takes_ids[start:end])
    else:
        # With both and no mask, releases differ in which one the model takes.
        where = "embeddings" if request.prompt_token_ids is None else "both"
    return [("prompt embeds", f"{request.prompt_embeds.dtype} {where}")]


def mm_key(
    request: "Request", identifier: str, offset: int
) -> str | tuple[str, str, int]:
    """The part of a block's key for an image or similar input.

    Upstream uses the bare identifier.

    Args:
        request: The request with the image.
        identifier: Identifier of the image.
        offset: Offset of its beginning in the block; negative if it began earlier.

    """
    return identifier if loads_of(request) is None else ("mm", identifier, offset)
