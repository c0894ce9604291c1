# SPDX-License-Identifier: Apache-2.0
"""The namespace: a short name for everything that shapes the bytes of KV.

Objects outlive engines, so anything that changes the KV of the same tokens must be part
of their name. A part left out lets an engine read KV with another meaning; a needless
part costs some recomputation. So the name covers all settings of the engine and all
files that it loaded, except for those in `harmless`.
"""

import enum
import functools
import hashlib
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.stores.format import FORMAT_VERSION
from vllm.v1.kv_tier.stores.harmless import HARMLESS, counts
from vllm.v1.kv_tier.stores.weights import (
    FileStates,
    model_files,
    model_folder,
    processor_files,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_SETTING = "--kv-offloading-config: secondary_tiers"
_DIGEST_BYTES = 16

_KEY_HASHES = ("sha256", "sha256_cbor")
"""Algorithms for which no client can construct two prompts with the same key."""


def states_before_loading(vllm_config: "VllmConfig") -> FileStates:
    """States of all files that shape KV, before the ranks load them.

    Raises:
        ValueError: As in `namespace`, as far as it is known by now.

    """
    paths: list[Path] = []
    for model, load in _models(vllm_config):
        names = releases.weights_name(model), model.tokenizer, model.hf_config_path
        for name in filter(None, names):
            # The ranks may still have to download it.
            with suppress(ValueError):
                paths.append(model_folder(name, model.revision, load))

    def note(path: Path) -> str:
        paths.append(path)
        return ""

    _plain_settings(vllm_config, note)
    environment(note)
    return FileStates(paths)


def namespace(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    release: str,
    before: FileStates | None = None,
    sources: Sequence[tuple[str, str]] = (),
) -> str:
    """A name for everything that shapes the bytes and is known to this process.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.
        release: vLLM's version, since another one may compute different KV.
        before: States of the files before the ranks loaded them. None: take them now.
        sources: (repository, folder in it) of weights that models loaded beyond their
            own files.

    Returns:
        32 hex digits, the same in every process with these settings and files.

    Raises:
        ValueError: Something that shapes the bytes or their keys is unknown, or differs
            between processes. The message says what to change.

    """
    cache = vllm_config.cache_config
    if releases.calculates_kv_scales(cache):
        raise ValueError(
            f"{_SETTING} cannot keep KV whose scales are calculated from the first "
            "request (calculate_kv_scales): they differ in each engine. Set it to "
            "false, or remove secondary_tiers."
        )
    seed = _hash_seed(cache.prefix_caching_hash_algo)
    before = before or states_before_loading(vllm_config)
    digest = functools.partial(_digest_of, before)
    shape = {
        "format": FORMAT_VERSION,
        "vllm": release,
        "settings": _plain_settings(vllm_config, digest),
        "environment": environment(digest),
        "groups": _Plain(digest).of("groups", kv_cache_config.kv_cache_groups),
        "hashes": seed,
        "files": files_of_models(vllm_config, before, sources),
    }
    name = _digest(shape)
    logger.debug("KV tier: %s is the name for %s", name, shape)
    return name


def environment(digest: Callable[[Path], str] | None = None) -> dict[str, Any]:
    """Variables of this process that may shape KV, as they are set.

    Args:
        digest: As of `_Plain`.

    """
    plain = _Plain(digest)
    return {k: plain.of(k, v) for k, v in sorted(os.environ.items()) if counts(k)}


def rank_namespace(namespace: str, rank: int, description: object) -> str:
    """A namespace extended by what only the rank knows: layout, attention backends."""
    return _digest([namespace, rank, _Plain().of("a rank", description)])


def _models(vllm_config: "VllmConfig") -> list[tuple[Any, Any]]:
    """The model, and a draft model if there is one, each with its load settings."""
    load = vllm_config.load_config
    found = [(vllm_config.model_config, load)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        draft_load = releases.draft_load_config(speculative) or load
        found.append((speculative.draft_model_config, draft_load))
    return found


def files_of_models(
    vllm_config: "VllmConfig",
    before: FileStates | None,
    sources: Sequence[tuple[str, str]] = (),
) -> list[list[list[object]]]:
    """Name, size and digest of each file that models were loaded from.

    Args:
        vllm_config: Settings of the engine.
        before: States of the files before they were loaded. None: take them now.
        sources: As in `namespace`.

    Raises:
        ValueError: The files are unknown. The message says what to change.

    """
    before = before or states_before_loading(vllm_config)
    found = []
    for folder, paths in _paths_of_models(vllm_config, sources):
        digests = before.digests(paths)
        found.append(
            [
                [os.path.relpath(path, folder.parent if folder in paths else folder)]
                + [path.stat().st_size, digest]
                for path, digest in zip(paths, digests)
            ]
        )
    return found


def youngest_s(
    vllm_config: "VllmConfig", sources: Sequence[tuple[str, str]] = ()
) -> float:
    """When models' files, or the links and folders that lead to them, last changed."""
    return max(
        max(status.st_ctime, status.st_mtime)
        for _, paths in _paths_of_models(vllm_config, sources)
        for path in paths
        for place in (path, *path.absolute().parents[:2])
        for status in (place.stat(), place.lstat())
    )


def _paths_of_models(
    vllm_config: "VllmConfig", sources: Sequence[tuple[str, str]]
) -> list[tuple[Path, list[Path]]]:
    """The folder and the files of each model."""
    models = _models(vllm_config)
    own = {model.model for model, _ in models}
    for name, _ in sources:
        if name not in own:
            raise ValueError(
                f"{_SETTING} cannot keep KV of a model that takes weights from another "
                f"repository ({name}), whose files may change without its own. Remove "
                "secondary_tiers."
            )
    found = []
    for model, load in models:
        inner = sorted({place for name, place in sources if name == model.model} - {""})
        folder, paths = model_files(model, load, inner)
        found.append((folder, paths))
        found += processor_files(model, load)
    return found


def _digest_of(states: FileStates, path: Path) -> str:
    return states.digests([path])[0]


def _hash_seed(algorithm: str) -> list[str]:
    """Algorithm and seed of NONE_HASH, the parent of first blocks.

    Upstream sets NONE_HASH only after the tier has started.
    """
    if algorithm not in _KEY_HASHES:
        raise ValueError(
            f"{_SETTING}: with --prefix-caching-hash-algo {algorithm} a client can "
            "make prompts whose blocks have the same keys as others, and a store "
            "shares the KV of a key with all. Use --prefix-caching-hash-algo "
            f"{_KEY_HASHES[0]}."
        )
    seed = os.getenv("PYTHONHASHSEED")
    resolve = releases.none_hash_seed_of()
    if resolve is not None:
        # Random if it differs between calls. Releases without the function always draw
        # it.
        from vllm.utils.hashing import get_hash_fn_by_name

        function = get_hash_fn_by_name(algorithm)
        first, second = resolve(function), resolve(function)
        seed = first if first == second else None
    # For "random" Python draws a seed, and an algorithm of v0.9.2 uses Python's hash.
    if seed is None or seed == "random":
        other = "" if resolve is None else ", or --prefix-caching-hash-algo sha256"
        raise ValueError(
            f"{_SETTING}: block hashes of --prefix-caching-hash-algo {algorithm} begin "
            "with a random number in each process, so no stored block would ever be "
            f"found. Set PYTHONHASHSEED=0 in the environment of all engines{other}."
        )
    return [algorithm, seed]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain_settings(vllm_config: "VllmConfig", digest: Callable[[Path], str]) -> Any:
    fields = _Plain(digest).fields_of("", "VllmConfig", vllm_config)
    return dict(fields)


class _Plain:
    """Converts values to JSON, without addresses or random order.

    Args:
        digest: Digest of a file that a setting names. None: texts that look like paths
            are kept as texts.

    """

    def __init__(self, digest: Callable[[Path], str] | None = None) -> None:
        self._digest = digest

    def of(self, name: str, value: Any) -> Any:
        """Convert the value of the setting `name`.

        Raises:
            ValueError: It has no text that is the same in every process.

        """
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str | PurePath):
            return self._text(str(value))
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return self._code(name, value)
        if isinstance(value, functools.partial):
            return self.of(name, [value.func, list(value.args), value.keywords])
        if isinstance(value, Mapping):
            return {str(k): self.of(f"{name}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(name, each) for each in value]
        if isinstance(value, set | frozenset):
            return sorted(
                json.dumps(self.of(name, each), sort_keys=True) for each in value
            )
        return self._object(name, value)

    def fields_of(self, name: str, kind: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Fields of a configuration that are not listed as harmless."""
        harmless = HARMLESS.get(kind, {})
        for field, each in releases.field_values(value).items():
            if field not in harmless:
                inner = f"{name}.{field}" if name else field
                yield field, self.of(inner, each)

    def _object(self, name: str, value: Any) -> Any:
        kind = type(value)
        if (found := releases.as_dict(value)) is not None:
            # A model's configuration. Its location does not matter.
            return self.of(name, _without(found, "_name_or_path"))
        if fields := dict(self.fields_of(name, kind.__name__, value)):
            return [kind.__qualname__, fields]
        if (digest := releases.digest_of(value)) is not None:
            return [kind.__qualname__, digest]
        text = repr(value)
        if re.search(r" at 0x[0-9a-f]+", text):
            raise ValueError(
                f"{_SETTING}: the setting {name} is a {kind.__module__}."
                f"{kind.__qualname__}, which has no text to compare between engines. "
                "Remove that setting, or secondary_tiers."
            )
        return text

    def _text(self, text: str) -> Any:
        # A plain name in the working directory is not taken for a path.
        if self._digest is not None and os.sep in text and os.path.isfile(text):
            return {"file": self._digest(Path(text))}
        return text

    def _code(self, name: str, value: Any) -> str:
        path = f"{value.__module__}.{value.__qualname__}"
        if "<" in path:
            raise ValueError(
                f"{_SETTING}: the setting {name} is {path}, a function without a name "
                "that other engines could import. Remove that setting, or "
                "secondary_tiers."
            )
        return path


def _without(value: Any, key: str) -> Any:
    """A copy without this key, also in nested dictionaries."""
    if isinstance(value, Mapping):
        return {k: _without(v, key) for k, v in value.items() if k != key}
    if isinstance(value, list | tuple):
        return [_without(each, key) for each in value]
    return value
