# SPDX-License-Identifier: Apache-2.0
"""No release serves a state under the key of a prefix that it does not end.

First the fault on upstream's own tree, where it has it, then that the series mends it.
"""

from pathlib import Path

import pytest

from . import upstream
from .test_uncomputed import run

# The test's own name for the folder of upstream's package.
from .test_uncomputed import upstream as upstreams_package  # noqa: F401

pytestmark = pytest.mark.skipif(
    not upstream.HAS_PARTIAL_HITS, reason="no hits inside blocks are simulated"
)
MODULE = "tests.sim.overwritten"


def test_the_series_does_not() -> None:
    found = run(module=MODULE)
    assert found["state"] > 0
    assert found["key"] in (None, found["state"])


def test_upstream_where_the_series_has_a_prerequisite_for_it(
    upstreams_package: Path,  # noqa: F811
) -> None:
    """When this fails with a new release, that prerequisite has done its work."""
    found = run(upstreams_package, module=MODULE)
    tag = Path((upstreams_package / "vllm").resolve()).parent.parent.name
    patches = Path(__file__).parents[2] / "patches" / tag
    name = "0000-prerequisite-states-that-are-overwritten.patch"
    mends = (patches / name).is_file()
    assert mends == (found["key"] not in (None, found["state"]))
