# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md says what the code publishes."""

from dataclasses import replace
from pathlib import Path

import pytest

import metrics_doc

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_that_of_the_code() -> None:
    assert DOC.read_text() == metrics_doc.page(), "run `make docs-metrics`"


def test_a_new_metric_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(metrics_doc.METRICS[0], name="another")
    monkeypatch.setattr(metrics_doc, "METRICS", (*metrics_doc.METRICS, one))
    with pytest.raises(AssertionError, match="docs-metrics"):
        test_the_page_is_that_of_the_code()
