# SPDX-License-Identifier: Apache-2.0
"""Merges `BlockStored` events of one block each into events of chains."""

from typing import Any

from msgspec.structs import asdict

from vllm.distributed.kv_events import BlockStored
from vllm.v1.kv_tier import releases


def chains(events: list[BlockStored]) -> list[BlockStored]:
    """Merge events of one block each where one continues another.

    Returns:
        The events, each after the one that stores its parent.

    """
    ends = {_place(event, event.block_hashes[-1]) for event in events}
    children: dict[Any, list[BlockStored]] = {}
    heads = []
    for event in reversed(events):
        parent = _place(event, event.parent_block_hash)
        if parent in ends:
            children.setdefault(parent, []).append(event)
        else:
            heads.append(event)
    chains = []
    while heads:
        chain = heads.pop()
        chains.append(chain)
        while following := children.pop(_place(chain, chain.block_hashes[-1]), None):
            # All but one start their own chains, after this one.
            longer = next((e for e in following if _append(chain, e)), None)
            heads += [event for event in following if event is not longer]
    return chains


def _place(event: BlockStored, block_hash: Any) -> tuple[int, Any]:
    """Identifies a block among those of all groups."""
    return releases.event_group(event), block_hash


def by_block(event: BlockStored) -> dict[str, list[Any]]:
    """Fields of `event` with one entry for each of its blocks."""
    return {
        name: value
        for name, value in asdict(event).items()
        if isinstance(value, list)
        and name != "token_ids"
        and len(value) == len(event.block_hashes)
    }


def _append(event: BlockStored, other: BlockStored) -> bool:
    """Append `other`, a child of `event`'s last block, if all other fields agree.

    Returns:
        Whether it was appended.

    """
    lists = ("token_ids", *by_block(other))
    ours, theirs = asdict(event), asdict(other)
    for name, value in ours.items():
        if name in lists:
            if not isinstance(value, list):
                return False
        elif name != "parent_block_hash" and value != theirs[name]:
            return False
    for name in lists:
        ours[name].extend(theirs[name])
    return True
