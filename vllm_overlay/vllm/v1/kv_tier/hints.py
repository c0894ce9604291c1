# SPDX-License-Identifier: Apache-2.0
"""What clients say of the KV of their requests.

A request carries hints in `kv_transfer_params`, which every release takes over HTTP
and, as an entry of `SamplingParams.extra_args`, from Python, under a key of its own:

    {"kv_transfer_params": {"kv_tier": {"conversation": "c42", "release": true}}}

Hints order eviction. None of them pins a block, and none of them changes an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

KEY = "kv_tier"
MAX_NAME = 256
"""Characters of the name of a conversation."""


@dataclass(frozen=True)
class Hints:
    """The hints of one request."""

    conversation: str | None = None
    """Name of the conversation, session or agent that the request belongs to. Requests
    without one are conversations of their own. Names are known to one engine, apart for
    each cache salt."""

    release: bool = False
    """Nobody will continue the conversation: when the request has ended, the blocks
    that only this conversation has used are evicted before all others, on the device
    and on the host, and are not stored any more. They serve hits until then."""

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> "Hints | None":
        """The hints among the `kv_transfer_params` of a request.

        Returns:
            None if there are none.

        Raises:
            ValueError: They are not as above. The message names field, value and mend.

        """
        if not params or (given := params.get(KEY)) is None:
            return None
        where = f"kv_transfer_params.{KEY}"
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{where} must be an object with {' and '.join(known)}, got {given!r}."
            )
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{where}: unknown field {name!r} (value {given[name]!r}). Use "
                    f"{', '.join(known)}."
                )
        hints = cls(**given)
        name, release = hints.conversation, hints.release
        if name is not None and not (
            isinstance(name, str) and 0 < len(name) <= MAX_NAME
        ):
            raise ValueError(
                f"{where}.conversation must be a string of 1 to {MAX_NAME} characters, "
                f"got {name!r}."
            )
        if not isinstance(release, bool):
            raise ValueError(f"{where}.release must be true or false, got {release!r}.")
        return hints
