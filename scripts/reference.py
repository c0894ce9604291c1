# SPDX-License-Identifier: Apache-2.0
"""Writes what the documents say of the code: the tables of settings and of metrics.

    PYTHONPATH=scripts build/env/v0.32.0/bin/python scripts/reference.py

Each stands between two marks of its page; the rest of the page is written by hand.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.metrics import METRICS, PREFIX, Metric

try:
    from vllm.config.utils import get_attr_docs
except ModuleNotFoundError:
    from vllm.config import get_attr_docs  # type: ignore[no-redef, attr-defined]

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


def settings() -> str:
    """A row for each key of `--kv-offloading-config`."""
    docs = get_attr_docs(KVTierConfig)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(KVTierConfig):
        if field.name != "size_bytes":
            default = json.dumps(field.default)
            meaning = " ".join(docs[field.name].split())
            lines.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(lines)


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


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "configuration.md": ("<!-- from KVTierConfig, by `make docs` -->", settings),
    "metrics.md": ("<!-- from METRICS, by `make docs` -->", metrics),
}
"""By page of docs/: the mark before the table, and what makes it."""


def with_reference(page: Path) -> str:
    """The text of a page, with the table of this code between its marks.

    Raises:
        ValueError: The page has no such marks.

    """
    begin, make = TABLES[page.name]
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
    text = page.read_text()
    if not marked.search(text):
        raise ValueError(f"{page} lacks {begin} and {END}")
    return marked.sub(lambda _: f"{begin}\n\n{make()}\n\n{END}", text)


def main() -> None:
    for name in TABLES:
        page = ROOT / "docs" / name
        page.write_text(with_reference(page))


if __name__ == "__main__":
    main()
