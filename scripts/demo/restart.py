# SPDX-License-Identifier: Apache-2.0
"""A server that was killed and started again, and a turn whose KV is in files."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .client import Answer, ChatClient, Message
from .talk import Exchange, last_turn

MIN_FROM_FILES = 0.8
"""Part of the prompt that must come from files."""
WRITE_TIMEOUT_S = 60

_BELOW = "vllm:kv_tier_secondary_"
WRITTEN, LOADED = (_BELOW + f"{n}_total" for n in ("stored_blocks", "loaded_tokens"))
PENDING = (_BELOW + "due_blocks", _BELOW + "writing_blocks")


@dataclass(frozen=True)
class Restart:
    """One turn: before a server was killed, and after it was started again.

    Attributes:
        before: its answer then.
        served: the first answer after the restart.
        computed: the same turn on the same server, for somebody who shares nothing.
        loaded_tokens: prompt tokens of `served` whose KV came from files.

    """

    before: Answer
    served: Answer
    computed: Answer
    loaded_tokens: int

    def failures(self) -> list[str]:
        """What it fell short of; nothing if the turn was served from files."""
        found = []
        prompt = self.served.prompt_tokens
        for what, tokens in (
            ("came from files", self.loaded_tokens),
            ("were hits", self.served.cached_tokens),
        ):
            if tokens < MIN_FROM_FILES * prompt:
                found.append(
                    f"after the restart {tokens} of {prompt} prompt tokens {what}, "
                    f"expected {MIN_FROM_FILES:.0%}"
                )
        if self.computed.cached_tokens:
            found.append(
                f"{self.computed.cached_tokens} tokens of the turn to compare with "
                "were hits: it was to be computed"
            )
        for when, answer in (("before", self.before), ("computed", self.computed)):
            if answer.token_ids != self.served.token_ids:
                found.append(
                    f"after the restart the answer from files is {self.served.text!r}, "
                    f"{when} it was {answer.text!r}"
                )
        return found

    def text(self) -> str:
        """The turn in a line."""
        return (
            f"after the restart: {self.served.cached_tokens} of "
            f"{self.served.prompt_tokens} prompt tokens cached, {self.loaded_tokens} "
            f"came from files; first token after {self.served.ttft_ms:.0f} ms, "
            f"computed {self.computed.ttft_ms:.0f} ms"
        )

    def as_json(self) -> dict[str, Any]:
        """The part of `report.json`."""
        return {
            "prompt_tokens": self.served.prompt_tokens,
            "cached_tokens": self.served.cached_tokens,
            "loaded_tokens": self.loaded_tokens,
            "ttft_ms_from_files": round(self.served.ttft_ms, 1),
            "ttft_ms_computed": round(self.computed.ttft_ms, 1),
            "identical": self.served.token_ids == self.before.token_ids,
        }


def until_written(client: ChatClient, answer_tokens: int) -> int:
    """Lets a server run steps until all that is to be written is in files.

    Returns:
        How many blocks it has written.

    Raises:
        RuntimeError: it does not come to an end.

    """
    limit = time.monotonic() + WRITE_TIMEOUT_S
    while time.monotonic() < limit:
        # Writes begin and end with steps.
        client.ask([{"role": "user", "content": "Go on."}], answer_tokens)
        metrics = client.metrics()
        if not any(map(metrics.value, PENDING)):
            return metrics.value(WRITTEN)
    raise RuntimeError(f"the server still writes files after {WRITE_TIMEOUT_S} s")


def restarted(
    client: ChatClient,
    warm_up: str,
    sayings: Sequence[str],
    exchanges: Sequence[Exchange],
) -> Restart:
    """Asks a new server for the last turn of the first conversation.

    Args:
        client: of the new server.
        warm_up: what is asked first, by somebody who shares nothing.
        sayings: what the user said in the conversation.
        exchanges: with the server that was killed.

    """
    turn, last = last_turn(sayings, exchanges, 1)
    tokens = len(last.answer.token_ids)
    first: list[Message] = [{"role": "user", "content": warm_up}]
    client.ask(first, tokens, salt="warm-up")
    before = client.metrics().value(LOADED)
    served = client.ask(turn, tokens)
    loaded = client.metrics().value(LOADED) - before
    computed = client.ask(turn, tokens, salt="computed")
    return Restart(last.answer, served, computed, loaded)
