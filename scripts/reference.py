# SPDX-License-Identifier: Apache-2.0
"""Writes the table of settings in docs/configuration.md from `KVTierConfig`.

PYTHONPATH=scripts build/env/v0.32.0/bin/python scripts/reference.py
"""

import dataclasses
import json
import re
from pathlib import Path

from vllm.v1.kv_tier.config import KVTierConfig

try:
    from vllm.config.utils import get_attr_docs
except ModuleNotFoundError:
    from vllm.config import get_attr_docs  # type: ignore[no-redef, attr-defined]

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- from KVTierConfig, by `make docs` -->"
END = "<!-- end -->"


def configuration_page() -> Path:
    return ROOT / "docs" / "configuration.md"


def table() -> str:
    """A row for each key of `--kv-offloading-config`."""
    docs = get_attr_docs(KVTierConfig)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(KVTierConfig):
        if field.name != "size_bytes":
            default = json.dumps(field.default)
            meaning = " ".join(docs[field.name].split())
            lines.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(lines)


def with_reference(page: str) -> str:
    """A page whose part between the marks is the table.

    Raises:
        ValueError: The page has no such marks.

    """
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not marked.search(page):
        raise ValueError(f"{configuration_page()} lacks {BEGIN} and {END}")
    return marked.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", page)


if __name__ == "__main__":
    path = configuration_page()
    path.write_text(with_reference(path.read_text()))
