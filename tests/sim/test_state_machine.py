# SPDX-License-Identifier: Apache-2.0
"""Random scripts on the real scheduler; every action is followed by all checks.

KV_TIER_SIM_EXAMPLES sets how many.
"""

import os
from dataclasses import replace

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from .scripts import SCRIPTS, Script

EXAMPLES = int(os.environ.get("KV_TIER_SIM_EXAMPLES", "2000"))


_OFTEN = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@_OFTEN
@given(SCRIPTS)
def test_scripts(script: Script) -> None:
    note(str(script))
    script.play()


@settings(_OFTEN, max_examples=max(EXAMPLES // 8, 1))
@given(SCRIPTS, st.integers(2, 4))
def test_scripts_of_a_pipeline(script: Script, num_stages: int) -> None:
    """More steps are in flight than in any engine without stages."""
    script = replace(script, setup=replace(script.setup, num_stages=num_stages))
    note(str(script))
    script.play()
