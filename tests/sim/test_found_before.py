# SPDX-License-Identifier: Apache-2.0
"""Scripts that once found a bug, as small as they could be made."""

import pytest

from .layouts import ALL
from .scheduler import Setup
from .scripts import Add, Script, Steps

_BY_NAME = {layout.name: layout for layout in ALL}

# A load fails in a step whose request the next step has already preempted: its
# output must be dropped.
FAILED_LOAD_OF_PREEMPTED = Script(
    Setup(
        _BY_NAME["full"],
        spare_blocks=6,
        num_slots=6,
        is_async=True,
        token_budget=17,
        by_priority=True,
    ),
    [
        Add(base=0, length=3, suffix=0, max_tokens=2),
        Steps(2),
        Add(base=0, length=20, suffix=6, max_tokens=1),
        Steps(2),
        Add(base=2, length=12, suffix=0, max_tokens=7),
        Steps(5),
        Add(base=2, length=16, suffix=0, max_tokens=2, priority=1),
        Add(base=0, length=8, suffix=4, max_tokens=2, has_salt=True, copies=3),
        Add(base=2, length=3, suffix=4, max_tokens=9),
        Add(base=5, length=3, suffix=0, max_tokens=1),
        Steps(4, fail="store"),
        Add(base=0, length=8, suffix=0, max_tokens=2, has_salt=True),
    ],
)

# A hit ends inside a block that another request computes in the same step; the
# copy-on-write would come first. Possible since the state of the same prefix can
# come from the host.
COPY_OF_UNCOMPUTED_BLOCK = Script(
    Setup(
        _BY_NAME["full+mamba, partial hits"],
        spare_blocks=1,
        num_slots=40,
        token_budget=23,
        max_num_seqs=2,
        retention=0,
    ),
    [
        Add(base=1, length=18, suffix=3, max_tokens=9),
        Add(base=0, length=3, suffix=0, max_tokens=7, copies=3),
        Steps(1, abort=5),
        Steps(8),
        Add(base=0, length=24, suffix=0, max_tokens=1),
        Steps(8, fail="store"),
        Add(base=5, length=3, suffix=3, max_tokens=1, copies=3),
    ],
)


@pytest.mark.parametrize(
    "script",
    [FAILED_LOAD_OF_PREEMPTED, COPY_OF_UNCOMPUTED_BLOCK],
    ids=["failed load of a preempted request", "copy of an uncomputed block"],
)
def test_found_before(script: Script) -> None:
    if not script.setup.layout.is_known:
        pytest.skip("this release has no such models")
    script.play()
