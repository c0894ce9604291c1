# SPDX-License-Identifier: Apache-2.0
"""What the settings of all types of `secondary_tiers` have in common."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from vllm.v1.kv_tier.stores.base import BlockStore

SECONDARY_TIERS = "--kv-offloading-config: secondary_tiers"
FETCH = IF_FASTER, ALWAYS = ("if_faster", "always")


@dataclass(frozen=True, kw_only=True)
class StoreConfig(ABC):
    """An entry of `secondary_tiers`. Its fields are the keys of the entry.

    It is sent to all ranks. An entry whose `type` is an import path names a subclass.
    """

    example: ClassVar[str]
    """An entry with all that must be there, for messages."""

    locality: ClassVar[str] = "REMOTE"
    """`LOCAL` or `REMOTE`, as KV events have it."""

    store_from_use: int = 2
    """Write a block only from its n-th use on: being computed is one, and so is every
    hit. `1` writes all that the host tier has."""

    deadline_ms: float = 5000.0
    """How long a fetch may take, in milliseconds. What has not begun by then is
    computed."""

    fetch: str = IF_FASTER
    """Which blocks are fetched. `if_faster`: where that takes less time than computing
    them, as measured. `always`: all that the tier has, which spares the device work
    and may take a request longer."""

    flush_s: float = 3.0
    """How long the engine, told to end, writes what the host has and the tier has not,
    in seconds: what was used most first. So long an engine without requests goes on
    with what it was to write, too. `0` writes nothing then."""

    index: int = 0
    """Which entry it is, for messages. Not a key of the entry."""

    @classmethod
    def from_entry(cls, entry: dict[str, Any], index: int = 0) -> Self:
        """The settings of an entry of `secondary_tiers`.

        Raises:
            ValueError: A setting is wrong. The message names it, its value and the
                mend.

        """
        setting, kind = f"{SECONDARY_TIERS}[{index}]", entry.get("type")
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "index"}
        for key in entry:
            if key not in fields and key != "type":
                # A text may be a password.
                value = entry[key]
                shown = f" (value {value!r})" if isinstance(value, int | float) else ""
                if "pass" in str(key).lower():
                    shown = ""
                raise ValueError(
                    f"{setting}: unknown key {key!r}{shown}. Known keys of type "
                    f"{kind!r}: {', '.join(fields)}."
                )
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in entry:
                raise ValueError(
                    f"{setting}.{name} is missing. An entry of type {kind!r} needs at "
                    f"least {cls.example}."
                )
        values = {key: entry[key] for key in fields if key in entry}
        config = cls(**values, index=index)
        config.check_values()
        return config

    @property
    @abstractmethod
    def name(self) -> str:
        """Where it is, for messages: nothing that must stay secret."""

    @property
    def uses_memory_file(self) -> bool:
        """Whether the store is of more use where host memory is a file that other
        processes can map, see `BlockStore.register_file`."""
        return False

    def check_values(self) -> None:
        """Look at the values alone.

        Raises:
            ValueError: One is wrong. The message names it, its value and the mend.

        """
        self.check_above_0("deadline_ms")
        self.check_above_0("flush_s", or_0=True)
        self.check_whole("store_from_use")
        if self.fetch not in FETCH:
            raise ValueError(
                f"{self.setting('fetch')} must be one of {', '.join(FETCH)}, got "
                f"{self.fetch!r}."
            )

    def of_a_reader(self) -> Self:
        """The settings for a rank whose objects another rank writes."""
        return self

    @abstractmethod
    def check(self) -> None:
        """See that it can be used: once for all, and on each rank before it opens it.

        Raises:
            ValueError: It cannot. The message names the setting, its value and the
                mend.

        """

    @abstractmethod
    def open(self, namespace: str, rank: int, slot_bytes: int) -> BlockStore:
        """The store of a rank.

        Args:
            namespace: What shaped the bytes: hex digits, see `identity`.
            rank: Whose part they are.
            slot_bytes: Size of a row, in bytes.

        Raises:
            OSError: It cannot be used.

        """

    # ------------------------------------------------------- for those who check

    def setting(self, name: str) -> str:
        """A setting as messages begin with it."""
        return f"{SECONDARY_TIERS}[{self.index}].{name}"

    def check_above_0(self, *names: str, or_0: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_right = is_number and 0 <= value < math.inf and (or_0 or value)
            if not is_right:
                least = "0 or more" if or_0 else "above 0"
                raise ValueError(
                    f"{self.setting(name)} must be {least}, got {value!r}."
                )

    def check_whole(self, name: str, least: int = 1, most: float = math.inf) -> None:
        value = getattr(self, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:
            upto = "on" if most == math.inf else f"to {most}"
            raise ValueError(
                f"{self.setting(name)} must be a whole number from {least} {upto}, got "
                f"{value!r}."
            )

    def check_text(self, name: str, like: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{self.setting(name)} must be a text, got {value!r}. Give one like "
                f"{like}."
            )
