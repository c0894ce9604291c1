# SPDX-License-Identifier: Apache-2.0
"""`make soak`, shorter: `KV_TIER_SOAK=30 make test-e2e` for 30 seconds of load."""

import os
from pathlib import Path

import pytest

from soak.__main__ import Sizes, Soak

SECONDS = float(os.environ.get("KV_TIER_SOAK", 0))

pytestmark = pytest.mark.skipif(not SECONDS, reason="KV_TIER_SOAK is not set")


@pytest.mark.compat("faults", "mixed HTTP load at 20 times the device cache")
@pytest.mark.compat("faults", "clients that hang up")
def test_mixed_load(tmp_path: Path) -> None:
    report = Soak(tmp_path, Sizes(SECONDS / 60, warm_up_minutes=0)).run()
    assert report["failures"] == []
    assert report["overcommit"] > 20
    assert report["wrong_when_spoilt"] > 0
