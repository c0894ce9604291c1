# SPDX-License-Identifier: Apache-2.0
"""Settings of `secondary_tiers`: what all types have in common, and types by name or
import path.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import Self

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_tier.options import (
    FLAG,
    SETTINGS,
    Above0,
    Count,
    From0,
    Text,
    make,
    path,
    with_debug,
)
from vllm.v1.kv_tier.stores.base import BlockStore

SECONDARY_TIERS = f"{FLAG}: secondary_tiers"
ALWAYS = "always"


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class StoreDebug:
    """`debug` of an entry of `secondary_tiers`. Its fields are the keys."""

    store_from_use: Count = 2
    """Write a block only from its n-th use on: being computed is one, and so is every
    hit. `1` writes all that the host tier has."""

    deadline_ms: Above0 = 5000.0
    """How long a read may take, and a request wait for it, in milliseconds. The rest is
    computed."""

    fetch: Literal["if_faster", "always"] = "if_faster"
    """`always` fetches all that the tier has, however long computing it takes, and no
    request computes meanwhile: for tests and measurements."""

    flush_s: From0 = 3.0
    """How long the engine, when it ends, writes blocks that the host has and the tier
    lacks, in seconds: the most used first. An engine without requests goes on writing
    for as long, too. `0` writes nothing then."""


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class StoreConfig(ABC):
    """An entry of `secondary_tiers`. Its fields are the keys of the entry.

    It is sent to all ranks. An entry whose `type` is an import path names a subclass.
    """

    example: ClassVar[str]
    """An entry with all required keys, for messages."""

    locality: ClassVar[str] = "REMOTE"
    """`LOCAL` or `REMOTE`, as KV events have it."""

    type: Text = field(default="", compare=False)
    """`fs`, `redis`, `mooncake`, or the import path of a `StoreConfig`."""

    debug: StoreDebug = field(default_factory=StoreDebug)

    index: int = 0
    """Which entry it is, for messages. Not a key of the entry."""

    @classmethod
    def from_entry(
        cls, entry: dict[str, Any], index: int = 0
    ) -> tuple[Self, list[str]]:
        """The settings of an entry of `secondary_tiers`, and those of its keys that
        belong into `debug`.

        Raises:
            ValueError: A line for each wrong setting names it, its value and the fix.

        """
        setting = f"{SECONDARY_TIERS}[{index}]"
        own = vars(cls)
        if "__dataclass_params__" in own and "__pydantic_validator__" not in own:
            raise ValueError(
                f"{setting}.type {entry.get('type')!r} is a plain dataclass, whose "
                "settings are not checked. Decorate it with that of "
                "pydantic.dataclasses."
            )
        values, moved = with_debug(cls, entry, setting)
        return make(cls, values, setting, index=index), moved

    @property
    @abstractmethod
    def name(self) -> str:
        """Where it is, for messages: nothing that must stay secret."""

    @property
    def uses_memory_file(self) -> bool:
        """Whether the store is of more use where host memory is a file that other
        processes can map, see `BlockStore.register_file`."""
        return False

    def of_a_reader(self) -> Self:
        """The settings for a rank whose objects another rank writes."""
        return self

    @abstractmethod
    def check(self) -> None:
        """See that it can be used: once for all, and on each rank before it opens it.

        Raises:
            ValueError: It cannot. The message names the setting, its value and the fix.

        """

    @abstractmethod
    def open(self, namespace: str, rank: int, slot_bytes: int) -> BlockStore:
        """The store of a rank.

        Args:
            namespace: What shaped the bytes: hex digits, see `identity`.
            rank: Whose part they are.
            slot_bytes: Most bytes of a row.

        Raises:
            OSError: It cannot be used.

        """

    def setting(self, *keys: str) -> str:
        """A setting as messages begin with it."""
        return path(f"{SECONDARY_TIERS}[{self.index}]", *keys)


_STORES = "vllm.v1.kv_tier.stores"
STORES = {
    "fs": f"{_STORES}.fs.FsConfig",
    "redis": f"{_STORES}.redis.RedisConfig",
    "mooncake": f"{_STORES}.mooncake.MooncakeConfig",
}
"""Import paths of the settings of each type. Nothing else imports these modules."""


def store_types() -> dict[str, type[StoreConfig]]:
    """The settings of each type that has a name."""
    return {name: resolve_obj_by_qualname(path) for name, path in STORES.items()}


KNOWN = f"one of {', '.join(STORES)}, or the import path of a StoreConfig"
EXAMPLE = '[{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}]'


def parse_tiers(tiers: Any) -> tuple[tuple[StoreConfig, ...], list[str]]:
    """The settings of `secondary_tiers`, and those keys that belong into `debug`.

    Args:
        tiers: A list of JSON objects, or None.

    Raises:
        ValueError: A line for each wrong setting names it, its value and the fix.

    """
    if tiers is None:
        return (), []
    if not isinstance(tiers, list | tuple):
        raise ValueError(
            f"{SECONDARY_TIERS} must be a list of tiers, got a {type(tiers).__name__}. "
            f"Use {EXAMPLE}."
        )
    found: list[StoreConfig] = []
    moved: list[str] = []
    lines: list[str] = []
    for index, entry in enumerate(tiers):
        try:
            config, keys = parse_entry(entry, index)
        except ValueError as e:
            lines.append(str(e))
        else:
            found.append(config)
            moved += keys
    if lines:
        raise ValueError("\n".join(lines))
    return tuple(found), moved


def parse_entry(entry: Any, index: int = 0) -> tuple[StoreConfig, list[str]]:
    """The settings of an entry of `secondary_tiers`, and those keys that belong into
    `debug`.

    Args:
        entry: A JSON object.
        index: Its place in the list.

    Raises:
        ValueError: The type is unknown, or one of its settings is wrong.

    """
    setting = f"{SECONDARY_TIERS}[{index}]"
    if not isinstance(entry, dict):
        raise ValueError(
            f"{setting} must be an object with a type ({KNOWN}), got a "
            f"{type(entry).__name__}."
        )
    kind = entry.get("type")
    config: object = None
    if isinstance(kind, str) and (kind in STORES or "." in kind):
        try:
            config = resolve_obj_by_qualname(STORES.get(kind, kind).replace(":", "."))
        except (ImportError, AttributeError, ValueError) as e:
            raise ValueError(
                f"{setting}.type {kind!r} cannot be imported ({e}). Give the path "
                "package.module.Class."
            ) from e
    if (
        not isinstance(config, type)
        or not issubclass(config, StoreConfig)
        or inspect.isabstract(config)
    ):
        raise ValueError(f"{setting}.type must be {KNOWN}, got {kind!r}.")
    return config.from_entry(entry, index)
