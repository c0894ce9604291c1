# SPDX-License-Identifier: Apache-2.0
"""Which scheduler classes send the tier's plan with their steps."""

import inspect
from abc import ABCMeta
from collections.abc import Iterator
from types import FunctionType


def takes_plans(scheduler: type) -> bool:
    """Whether the steps of a scheduler class carry the tier's plan.

    Judged by names in its code: `schedule` takes the plan, or calls the `schedule` of a
    base class that does, or of another object. Compiled code cannot be read, and is
    accepted.
    """
    for base in scheduler.__mro__:
        schedule = vars(base).get("schedule")
        if schedule is None or "schedule" in _abstract_methods(base):
            continue
        schedule = inspect.unwrap(schedule)
        if not inspect.isfunction(schedule):
            return True
        names = set(_names_in(schedule, scheduler, set()))
        if "take_plan" in names:
            return True
        if "schedule" not in names:
            return False
    return True


def _abstract_methods(kind: type) -> frozenset[str]:
    return kind.__abstractmethods__ if isinstance(kind, ABCMeta) else frozenset()


def _names_in(
    function: FunctionType, owner: type, seen: set[FunctionType]
) -> Iterator[str]:
    """Attributes and globals that a function uses.

    Includes those of functions that it closes over (as decorators do), and of methods
    of `owner` that it names.
    """
    seen.add(function)
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names |= set(code.co_names)
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    yield from names
    called = [cell.cell_contents for cell in function.__closure__ or ()]
    methods = dict(inspect.getmembers(owner, inspect.isfunction))
    called += [methods.get(name) for name in names - {"schedule"}]
    for other in called:
        if inspect.isfunction(other) and other not in seen:
            yield from _names_in(other, owner, seen)
