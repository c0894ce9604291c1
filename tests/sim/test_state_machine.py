# SPDX-License-Identifier: Apache-2.0
"""Random scripts on the real scheduler; every action is followed by all checks.

KV_TIER_SIM_EXAMPLES sets how many.
"""

import os

from hypothesis import HealthCheck, given, note, settings

from .scripts import SCRIPTS, Script

EXAMPLES = int(os.environ.get("KV_TIER_SIM_EXAMPLES", "2000"))


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(SCRIPTS)
def test_scripts(script: Script) -> None:
    note(str(script))
    script.play()
