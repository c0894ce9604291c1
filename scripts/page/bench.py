# SPDX-License-Identifier: Apache-2.0
"""The page of a benchmark: what `compare.py --report` writes, in one file."""

import tempfile
from pathlib import Path

import markdown

from bench.suite.report import report
from bench.suite.table import Results

from .html import Section, png, render


def bench_page(folder: Path, reference: str = "none") -> str:
    """The page of the benchmark results in `folder`.

    Raises:
        ValueError: There is nothing to report.

    """
    with tempfile.TemporaryDirectory() as made:
        text = report([folder], Path(made), reference, None)
        pictures = {path.stem: png(path) for path in Path(made).glob("*.png")}
    # The pictures have sections of their own.
    lines = [line for line in text.splitlines() if not line.startswith("![")]
    head, *parts = "\n".join(lines).split("\n## ")
    sections = []
    for part in parts:
        title, _, body = part.partition("\n")
        html = markdown.markdown(body, extensions=["tables"])
        sections.append(Section(title, image=pictures.get(title, ""), html=html))
    configs = ", ".join(Results([folder]).configs)
    return render("KV tier benchmark", f"{configs}. {head.strip()}", [], sections)
