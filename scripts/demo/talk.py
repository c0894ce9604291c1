# SPDX-License-Identifier: Apache-2.0
"""Conversations that take turns, so that each finds its KV evicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .client import Answer, ChatClient, Message

DEVICE_HITS = "vllm:kv_tier_device_hit_tokens_total"
HOST_HITS = "vllm:kv_tier_host_hit_tokens_total"
STORED = ("vllm:kv_tier_stored_blocks_total",)
LOADED = (
    "vllm:kv_tier_loaded_blocks_total",
    "vllm:kv_tier_loaded_ahead_blocks_total",
)
SLOT_BYTES = "vllm:kv_tier_slot_bytes"


def last_turn(
    sayings: Sequence[str], exchanges: Sequence["Exchange"], conversation: int
) -> tuple[list[Message], "Exchange"]:
    """The last turn of a conversation: what was asked, and what came of it.

    Args:
        sayings: all that the user said in it.
        exchanges: of all conversations, in the order they were talked.
        conversation: counted from 1.

    """
    *before, last = [e for e in exchanges if e.conversation == conversation]
    messages: list[Message] = []
    for saying, exchange in zip(sayings, before):
        messages.append({"role": "user", "content": saying})
        messages.append({"role": "assistant", "content": exchange.answer.text})
    return [*messages, {"role": "user", "content": sayings[-1]}], last


@dataclass(frozen=True)
class Exchange:
    """One turn of one conversation: both counted from 1.

    Attributes:
        stored_bytes: copied to host memory since the exchange before ended.
        loaded_bytes: copied from it.

    """

    conversation: int
    turn: int
    answer: Answer
    device_hit_tokens: int
    host_hit_tokens: int
    stored_bytes: int = 0
    loaded_bytes: int = 0


def ask_with_hits(
    client: ChatClient, messages: Sequence[Message], max_tokens: int, tier: bool
) -> tuple[Answer, int, int]:
    """An answer, and how many prompt tokens the device and the host had.

    Nobody else may use the server meanwhile: the counters are the server's. A
    server without the tier has one cache only, and `usage` tells all.

    Raises:
        LookupError: `tier` is true and the server does not count hits.

    """
    if not tier:
        answer = client.ask(messages, max_tokens)
        return answer, answer.cached_tokens, 0
    before = client.metrics()
    answer = client.ask(messages, max_tokens)
    after = client.metrics()
    device, host = (
        after.value(name) - before.value(name) for name in (DEVICE_HITS, HOST_HITS)
    )
    return answer, device, host


def talk(
    client: ChatClient,
    conversations: Sequence[Sequence[str]],
    max_tokens: int,
    tier: bool,
    note: Callable[[str], None],
) -> list[Exchange]:
    """First turn of every conversation, second turn of every conversation, …"""
    histories: list[list[Message]] = [[] for _ in conversations]
    exchanges = []
    moved = _moved(client) if tier else (0, 0)
    for turn, sayings in enumerate(zip(*conversations, strict=True), start=1):
        for number, (history, saying) in enumerate(zip(histories, sayings), start=1):
            history.append({"role": "user", "content": saying})
            answer, device, host = ask_with_hits(client, history, max_tokens, tier)
            history.append({"role": "assistant", "content": answer.text})
            before, moved = moved, _moved(client) if tier else (0, 0)
            stored, loaded = (now - then for now, then in zip(moved, before))
            exchanges.append(
                Exchange(number, turn, answer, device, host, stored, loaded)
            )
            note(
                f"turn {turn}, conversation {number}: {answer.prompt_tokens} prompt "
                f"tokens, {device} on device, {host} in host memory, "
                f"first token after {answer.ttft_ms:.0f} ms"
            )
    return exchanges


def _moved(client: ChatClient) -> tuple[int, int]:
    """Bytes that a server with the tier stored and loaded so far."""
    metrics = client.metrics()
    stored, loaded = (sum(map(metrics.value, names)) for names in (STORED, LOADED))
    slot_bytes = metrics.value(SLOT_BYTES)
    return stored * slot_bytes, loaded * slot_bytes
