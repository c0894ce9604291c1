# SPDX-License-Identifier: Apache-2.0
"""Whether two engines gave the same answers."""

from collections.abc import Sequence

from .engine import Answer

TOLERANCE = 1e-3
"""Log probabilities may differ by the order in which floats were added."""


def assert_same_answers(
    found: Sequence[Answer], expected: Sequence[Answer], tolerance: float = TOLERANCE
) -> None:
    """Same tokens, and the same top 5 of each but for ties.

    Raises:
        AssertionError: Names the first answer and token that differ.

    """
    assert len(found) == len(expected), "different number of answers"
    for i, (a, b) in enumerate(zip(found, expected)):
        assert a["tokens"] == b["tokens"], f"answer {i}: other tokens"
        assert a["others"] == b["others"], f"answer {i}: other samples"
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = a[name], b[name]  # type: ignore[literal-required]
            assert len(ours) == len(theirs), f"answer {i}: {name} missing"
            for position, (x, y) in enumerate(zip(ours, theirs)):
                where = f"answer {i}, {name} of token {position}"
                _assert_same_top(x, y, tolerance, where)


def _assert_same_top(
    found: Sequence[tuple[int, float]],
    expected: Sequence[tuple[int, float]],
    tolerance: float,
    where: str,
) -> None:
    a: dict[int, float] = {token: value for token, value in found}
    b: dict[int, float] = {token: value for token, value in expected}
    # A token that only one side lists must tie with the last of the other.
    floor = min(min(a.values()), min(b.values()))
    for token in a.keys() | b.keys():
        difference = abs(a.get(token, floor) - b.get(token, floor))
        assert difference <= tolerance, f"{where}: token {token} off by {difference}"
