# SPDX-License-Identifier: Apache-2.0
"""What the overlay asks of a release, where two releases differ in it."""

from weakref import ref

import pytest

from vllm.v1.kv_tier.releases import weak_reference_slots


class Plain:
    """Like `KVCacheBlock` until v0.16.0."""


class Slotted:
    """Like it since v0.19.1."""

    __slots__ = ()


@pytest.mark.parametrize("base", [Plain, Slotted])
def test_objects_of_a_subclass_with_slots_can_be_weakly_referenced(base: type) -> None:
    kind = type("Kind", (base,), {"__slots__": weak_reference_slots(base)})
    each = kind()
    assert ref(each)() is each
