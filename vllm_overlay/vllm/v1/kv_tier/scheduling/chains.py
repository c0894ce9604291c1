# SPDX-License-Identifier: Apache-2.0
"""Merges `BlockStored` events of one block each into events of chains."""

from typing import Any

from vllm.distributed.kv_events import BlockStored


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
    return getattr(event, "group_idx", None) or 0, block_hash


def by_block(event: BlockStored) -> dict[str, list[Any]]:
    """Fields of `event` with one entry for each of its blocks."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    return {
        name: value
        for name, value in values.items()
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
    for name in event.__struct_fields__:
        ours, theirs = getattr(event, name), getattr(other, name)
        if name in lists:
            if not isinstance(ours, list):
                return False
        elif name != "parent_block_hash" and ours != theirs:
            return False
    for name in lists:
        getattr(event, name).extend(getattr(other, name))
    return True
