# SPDX-License-Identifier: Apache-2.0
"""Writes what the documents say of the code: the tables of settings and of metrics.

    PYTHONPATH=scripts build/env/v0.32.0/bin/python scripts/reference.py

Each stands between two marks of its page; the rest of the page is written by hand.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig
from vllm.v1.kv_tier.metrics import METRICS, PREFIX, Metric
from vllm.v1.kv_tier.options import DEBUG, keys_of
from vllm.v1.kv_tier.stores.settings import StoreConfig, StoreDebug, store_types

try:
    from vllm.config.utils import get_attr_docs
except ModuleNotFoundError:
    from vllm.config import get_attr_docs  # type: ignore[no-redef, attr-defined]

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


def settings() -> str:
    """A row for each key of `--kv-offloading-config` but those of `debug`."""
    return "\n".join([*_HEAD, *_rows(KVTierConfig, "size_bytes", DEBUG)])


def store_settings() -> str:
    """A row for each key of an entry of `secondary_tiers` but those of `debug`."""
    lines = ["| type | key | default | meaning |", "|---|---|---|---|"]
    common = set(keys_of(StoreConfig)) - {"type"}
    lines += [f"| all {row}" for row in _rows(StoreConfig, *common)]
    for name, store in store_types().items():
        rows = _rows(store, *keys_of(StoreConfig))
        lines += [f"| `{name}` {row}" for row in rows]
    return "\n".join(lines)


def debug_settings() -> str:
    """A row for each key of `debug`."""
    return "\n".join([*_HEAD, *_rows(DebugConfig)])


def store_debug_settings() -> str:
    """A row for each key of `debug` of an entry of `secondary_tiers`."""
    lines = ["| type | key | default | meaning |", "|---|---|---|---|"]
    lines += [f"| all {row}" for row in _rows(StoreDebug)]
    for name, store in store_types().items():
        rows = _rows(get_type_hints(store)[DEBUG], *keys_of(StoreDebug))
        lines += [f"| `{name}` {row}" for row in rows]
    return "\n".join(lines)


_HEAD = "| key | default | meaning |", "|---|---|---|"


def _rows(cls: type, *left_out: str) -> Iterator[str]:
    """A row for each key of an object, with its default and its docstring."""
    docs = {k: v for c in reversed(cls.__mro__[:-1]) for k, v in _docs(c).items()}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in left_out:
            meaning = " ".join(docs[field.name].split())
            yield f"| `{field.name}` | {_default(field)} | {meaning} |"


def _docs(cls: type) -> dict[str, str]:
    """The docstrings of the fields that a class itself declares."""
    return get_attr_docs(cls) if "__annotations__" in vars(cls) else {}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    # All types but those by import path have names of their own.
    return f"`{json.dumps(field.default)}`" if field.name != "type" else "required"


def metrics() -> str:
    """A row for each of `vllm:kv_tier_*`."""
    head = ["| name | kind | label | |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_row, METRICS)])


SUFFIXES = {"counter": "_total", "histogram": "_bucket"}
"""What Prometheus adds to the name of a metric."""


def _row(metric: Metric) -> str:
    name = PREFIX + metric.name + SUFFIXES.get(metric.kind, "")
    values = ", ".join(f"`{value}`" for value in metric.values)
    label = f"`{metric.label}`: {values}" if metric.label else ""
    return f"| `{name}` | {metric.kind} | {label} | {metric.text} |"


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {
        "<!-- keys, by `make docs` -->": settings,
        "<!-- keys of secondary_tiers, by `make docs` -->": store_settings,
        "<!-- keys of debug, by `make docs` -->": debug_settings,
        "<!-- keys of debug of secondary_tiers, by `make docs` -->": (
            store_debug_settings
        ),
    },
    "metrics.md": {"<!-- from METRICS, by `make docs` -->": metrics},
}
"""By page of docs/: the mark before each table, and what makes it."""


def with_reference(page: Path) -> str:
    """The text of a page, with the tables of this code between its marks.

    Raises:
        ValueError: The page has no such marks.

    """
    text = page.read_text()
    for begin, make in TABLES[page.name].items():
        marked = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
        if not marked.search(text):
            raise ValueError(f"{page} lacks {begin} and {END}")
        table = f"{begin}\n\n{make()}\n\n{END}"
        text = marked.sub(lambda _, table=table: table, text)  # type: ignore[misc]
    return text


def main() -> None:
    for name in TABLES:
        page = ROOT / "docs" / name
        page.write_text(with_reference(page))


if __name__ == "__main__":
    main()
