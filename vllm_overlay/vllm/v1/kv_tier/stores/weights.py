# SPDX-License-Identifier: Apache-2.0
"""Identifies the files a model was loaded from by all of their bytes.

A merge can change a few tensors in the middle of a file and keep name, size and header,
so sampling bytes would serve KV of other weights. Files in a hub's cache are named by
the digest of their bytes. Others are read once; the digest is cached under the file's
inode, size and times, which change when it is written to.

The ranks load the files, and this process reads them afterwards. So it records their
states before the ranks begin (`FileStates`), and refuses a file whose state differs
later: KV of the old bytes would get the name of the new ones.
"""

import hashlib
import itertools
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.stores.harmless import is_harmless_file

logger = init_logger(__name__)

_SETTING = "--kv-offloading-config: secondary_tiers"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# Loaders that take all weights from the model's folder.
_FROM_FOLDER = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf"),
        *("bitsandbytes", "sharded_state", "fastsafetensors", "instanttensor"),
        *("runai_streamer", "runai_streamer_sharded"),
    }
)
_MAX_STATES = 100_000
_HEAD_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 64 << 10, 16, 4 << 10
_CHUNK_BYTES, _NUM_THREADS = 16 << 20, 4
# Age from which a file's times are trusted: another write then gives another time even
# with a coarse file system clock.
SETTLED_NS = 10 * 10**9
_MAX_REMEMBERED = 4096


class FileStates:
    """States of files before the ranks loaded them.

    Args:
        paths: Files, and folders with all files in them.

    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._before: dict[Path, str] = {}
        for path in paths:
            for file in [path] if path.is_file() else _tree(path):
                # A file without a recorded state is refused later.
                with suppress(OSError):
                    self._before[file] = _state(file)

    def digests(self, paths: Sequence[Path]) -> list[str]:
        """Digests in hex of the bytes of each file, as they were loaded.

        Raises:
            ValueError: A file has changed since.

        """
        with suppress(FileNotFoundError):
            found = _digests(paths)
        for path in paths:
            # Checked after reading, so that no change in between is missed.
            if not self._is_as_before(path):
                raise ValueError(
                    f"{_SETTING}: {path} was written or replaced while the engine "
                    "loaded it, so it is unknown which bytes the engine loaded. Start "
                    "the engine again, and leave its files alone until it runs."
                )
        return found

    def _is_as_before(self, path: Path) -> bool:
        if not path.exists():
            return False
        before = self._before.get(path)
        return _is_only_download(path) if before is None else before == _state(path)


def model_files(
    model: Any, load: Any, subfolders: Iterable[str] = ()
) -> tuple[Path, list[Path]]:
    """The folder of a model, and its files that shape KV.

    Args:
        model: Upstream's `ModelConfig`.
        load: Upstream's `LoadConfig`.
        subfolders: Subfolders that weights were loaded from too.

    Raises:
        ValueError: They are unknown. The message has the fix.

    """
    load_format = releases.load_format(load)
    if load_format == "dummy":
        raise ValueError(
            f"{_SETTING} cannot keep KV of random weights (--load-format dummy): they "
            "differ in each engine. Load weights, or remove secondary_tiers."
        )
    if load_format not in _FROM_FOLDER:
        _check_elsewhere(load_format, load)
    # When weights stream from elsewhere, only the configuration is here.
    name = releases.weights_name(model)
    folder = model_folder(name, model.revision, load)
    multimodal = model.multimodal_config is not None
    files = [folder] if folder.is_file() else _files_in(folder, multimodal)
    for subfolder in subfolders:
        files += _files_in(folder / subfolder, multimodal)
    if not any(path.suffix in _SUFFIXES for path in files):
        raise ValueError(
            f"{_SETTING}: {folder} has no weights ({', '.join(_SUFFIXES)}) to identify "
            f"the KV of model {name!r} by. Give a directory that has them with "
            "--model, or remove secondary_tiers."
        )
    return folder, files


def processor_files(model: Any, load: Any) -> list[tuple[Path, list[Path]]]:
    """Folders and files of image and audio processors beyond `model_files`."""
    if model.multimodal_config is None:
        return []
    names = {model.tokenizer, model.hf_config_path} - {model.model, None}
    found = []
    for name in sorted(filter(None, names)):
        folder = model_folder(name, model.tokenizer_revision, load)
        files = [folder] if folder.is_file() else _files_in(folder, multimodal=True)
        found.append((folder, files))
    return found


def model_folder(name: str, revision: str | None, load: Any) -> Path:
    """The folder of a model's files on this machine.

    Raises:
        ValueError: They are not on this machine.

    """
    if os.path.exists(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    directory = load.download_dir
    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=directory, local_files_only=True
            )
        )
    except Exception as e:
        raise ValueError(
            f"{_SETTING}: the weights of model {name!r} are not on this machine "
            f"({type(e).__name__}), so its KV cannot be identified. Download the model "
            "and give its directory with --model, or remove secondary_tiers."
        ) from e


def _check_elsewhere(load_format: str, load: Any) -> None:
    """Refuse weights whose bytes are not available here.

    A loader that gets its files only from settings is allowed: `identity` reads each
    file that a setting names.
    """
    options = str(load.model_loader_extra_config)
    if load_format == "tensorizer" and "://" not in options and "%" not in options:
        return
    raise ValueError(
        f"{_SETTING}: --load-format {load_format} loads weights from elsewhere than "
        "the model's directory, so their KV cannot be identified. Use --load-format "
        "auto with a directory, or remove secondary_tiers."
    )


def _files_in(folder: Path, multimodal: bool) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not is_harmless_file(path.name, multimodal)
    )


def _tree(folder: Path) -> Iterator[Path]:
    """Files in a folder, recursively and unordered; at most `_MAX_STATES`."""
    walk = (
        Path(parent, name) for parent, _, names in os.walk(folder) for name in names
    )
    return itertools.islice(walk, _MAX_STATES)


def _is_only_download(path: Path) -> bool:
    """Whether a new file is the one that the ranks downloaded and loaded.

    It must be named by the digest of its bytes, and no other snapshot may have weights.
    """
    if not _is_named_by_its_bytes(path):
        return False
    snapshot = next((p for p in path.parents if p.parent.name == "snapshots"), None)
    if snapshot is None:
        return False
    with_weights = {
        other
        for other in snapshot.parent.iterdir()
        if any(file.suffix in _SUFFIXES for file in other.iterdir())
    }
    return with_weights <= {snapshot}


def _digests(paths: Sequence[Path]) -> list[str]:
    """Digests in hex of the bytes of each file."""
    known, digests = _remembered(), {}
    for path in paths:
        if _is_named_by_its_bytes(path):
            digests[path] = _sample(path)
        elif (digest := known.get(_state(path))) is not None:
            digests[path] = digest
    if unknown := [path for path in paths if path not in digests]:
        begun, begun_ns = time.monotonic(), time.time_ns()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            read = dict(zip(unknown, threads.map(_read, unknown)))
        logger.info(
            "KV tier: read %.1f GB of model files in %.1f s to identify KV by all of "
            "their bytes.",
            sum(path.stat().st_size for path in unknown) / 1e9,
            time.monotonic() - begun,
        )
        digests |= {path: digest for path, (_, digest, _) in read.items()}
        settled = begun_ns - SETTLED_NS
        _remember({s: digest for s, digest, at in read.values() if at < settled})
    return [digests[path] for path in paths]


def _is_named_by_its_bytes(path: Path) -> bool:
    """Whether it links to a file in the hub's cache that is named by its digest."""
    blob = path.resolve()
    return blob.parent.name == "blobs" and bool(
        re.fullmatch("[0-9a-f]{40,}", blob.name)
    )


def _sample(path: Path) -> str:
    """Digest of a file's name in the hub's cache and of samples of its bytes.

    The samples detect most changes that were made to the file in the cache.
    """
    digest = hashlib.blake2b(path.resolve().name.encode(), digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for i in range(1, _NUM_SAMPLES + 1):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read(path: Path) -> tuple[str, str, int]:
    """Read a file.

    Returns:
        Its state, the digest of its bytes, and its last change in nanoseconds.

    Raises:
        ValueError: It changed while it was read.

    """
    before, status = _state(path), path.stat()
    digest = blake3(max_threads=blake3.AUTO)
    chunk = bytearray(_CHUNK_BYTES)
    # Not memory-mapped: if the file became shorter, this process would be killed.
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(chunk):
            digest.update(memoryview(chunk)[:num_bytes])
    if _state(path) != before:
        raise ValueError(
            f"{_SETTING}: {path} is being written to, so its KV cannot be identified. "
            "Start the engine when the file is complete."
        )
    return before, digest.hexdigest(16), max(status.st_mtime_ns, status.st_ctime_ns)


def _state(path: Path) -> str:
    """A text that changes when the file is written to."""
    s = path.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


# ---------------------------------------------------------------- digest cache


def _memory() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "kv_tier" / "weights.json"


def _remembered() -> dict[str, str]:
    """Cached digests by the state of files, if only this user can write the cache."""
    with suppress(OSError, ValueError):
        fd = os.open(_memory(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if is_ours and stat.S_ISREG(status.st_mode):
                found = json.load(file)
                return {str(key): str(value) for key, value in found.items()}
    return {}


def _remember(digests: dict[str, str]) -> None:
    """Add digests to the cache. If that fails, they are computed again next time."""
    if not digests:
        return
    known = _remembered()
    known = dict([*known.items(), *digests.items()][-_MAX_REMEMBERED:])
    path = _memory()
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_text(json.dumps(known))
        temporary.replace(path)
