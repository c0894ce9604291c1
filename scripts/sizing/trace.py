# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: lengths, arrivals and equal prefixes, no text.

JSON lines as the Mooncake traces have them: `timestamp` (ms), `input_length` and
`output_length` (tokens), and `hash_ids`, one id for each 512 tokens of the prompt.
Prompts with the same ids up to some place are equal up to there.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ID_TOKENS = 512
"""Prompt tokens behind one hash id. The last id of a prompt may stand for fewer."""
_MANY = 8


@dataclass(frozen=True)
class Call:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    floods: bool = False
    """Of another tenant, see `flood`, and not counted."""

    def block_ids(self, block_size: int) -> list[int]:
        """Numbers of the prompt's blocks; equal ones mean equal prefixes.

        The tail that does not fill a block counts as one, as in the trace itself.
        """
        per_id = ID_TOKENS // block_size
        num_blocks = -(-self.input_tokens // block_size)
        return [i * per_id + part for i in self.hash_ids for part in range(per_id)][
            :num_blocks
        ]


def read_trace(path: Path) -> list[Call]:
    """The requests of a trace, in order of arrival.

    Raises:
        ValueError: A line is not a request. The message names it.

    """
    calls = []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                calls.append(_call(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error!r}. Each line must be a JSON "
                    "object with timestamp, input_length, output_length and hash_ids "
                    f"(one for each {ID_TOKENS} tokens of the prompt)."
                ) from error
    if not calls:
        raise ValueError(f"{path} has no requests")
    return sorted(calls, key=lambda call: call.arrival_s)


def _call(fields: dict) -> Call:
    call = Call(
        arrival_s=float(fields["timestamp"]) / 1e3,
        input_tokens=int(fields["input_length"]),
        output_tokens=int(fields["output_length"]),
        hash_ids=tuple(map(int, fields["hash_ids"])),
    )
    expected = -(-call.input_tokens // ID_TOKENS)
    if call.input_tokens < 1 or len(call.hash_ids) != expected:
        raise ValueError(
            f"{call.input_tokens} prompt tokens and {len(call.hash_ids)} hash_ids"
        )
    return call


def conversations(calls: Sequence[Call]) -> list[int]:
    """The conversation of each call: the first id behind what many share.

    A trace names no conversations. Prompts of one have their beginning in common, and
    that of many conversations is a system prompt: an id that goes on in more than
    `_MANY` ways.
    """
    followers: dict[int, set[int]] = {}
    for call in calls:
        for before, after in zip(call.hash_ids, call.hash_ids[1:]):
            followers.setdefault(before, set()).add(after)
    shared = {i for i, after in followers.items() if len(after) > _MANY}
    return [
        next((i for i in call.hash_ids if i not in shared), call.hash_ids[-1])
        for call in calls
    ]


@dataclass(frozen=True)
class Senders:
    """Clients that say with its last call that a conversation is over.

    `told` is the part of the conversations whose clients do; `wrong` the part of what
    they say that comes with an earlier call, where there is one.
    """

    told: float = 0.0
    wrong: float = 0.0

    def last_calls(self, names: Sequence[int]) -> set[int]:
        """Indices of the calls that release their conversation, `names[i]` for call i.

        The same conversations for the same `told` and `wrong`.
        """
        places: dict[int, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(name, []).append(place)
        rng = random.Random(0)
        told = [own for own in places.values() if rng.random() < self.told]
        last = {own[-1] for own in told}
        several = [own for own in told if len(own) > 1]
        for own in rng.sample(
            several, min(len(several), round(self.wrong * len(told)))
        ):
            last.remove(own[-1])
            last.add(rng.choice(own[:-1]))
        return last


NOBODY = Senders()
"""Clients that send no hints."""


def unbounded_hit_rate(calls: Sequence[Call], block_size: int) -> float:
    """Part of the prompt blocks that a cache without limits would have had."""
    seen: set[int] = set()
    hits = total = 0
    for call in calls:
        ids = call.block_ids(block_size)
        hits += next((n for n, i in enumerate(ids) if i not in seen), len(ids))
        total += len(ids)
        seen.update(ids)
    return hits / total
