# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side of a tier remembers: each container that it can reach."""

from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

CONTAINERS = (dict, set, list, deque, WeakKeyDictionary, WeakValueDictionary, WeakSet)
_CODE = "vllm.v1.kv_tier."


def tables(pool: BlockPool) -> dict[str, Any]:
    """The containers that `pool` can reach, by the attributes that lead to them."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque([("pool", pool)])
    while todo:
        path, each = todo.popleft()
        if id(each) in seen or isinstance(each, KVCacheBlock):
            continue
        seen.add(id(each))
        if isinstance(each, CONTAINERS):
            found[path] = each
            values = each.values() if hasattr(each, "values") else each
            todo.extend((f"{path}[{i}]", v) for i, v in enumerate(list(values)))
        elif isinstance(each, tuple):
            todo.extend((f"{path}[{i}]", v) for i, v in enumerate(each))
        elif type(each).__module__.startswith(_CODE):
            todo.extend((f"{path}.{name}", value) for name, value in _attributes(each))
    return found


def sizes(pool: BlockPool) -> dict[str, int]:
    """Entries of each container that `pool` can reach."""
    return {path: len(each) for path, each in tables(pool).items()}


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(each).items() if hasattr(each, "__dict__") else ()
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(each, name):
                yield name, getattr(each, name)


def put_in(table: Any, item: Any) -> None:
    """Leave `item` in a container."""
    if isinstance(table, WeakKeyDictionary):
        table[item] = None
    elif isinstance(table, WeakSet):
        table.add(item)
    elif isinstance(table, dict | WeakValueDictionary):
        table[item] = item
    elif isinstance(table, set):
        table.add(item)
    else:
        table.append(item)
