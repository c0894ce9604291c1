# SPDX-License-Identifier: Apache-2.0
"""What KV memory holds, and what the model makes of it.

A value stands for the KV of one token in one group. It identifies everything
that real KV depends on: the whole prefix, its cache salt and LoRA, the group,
and the weights (`epoch`, changed by a prefix cache reset).
"""

VOCAB = 16
STOP_TOKEN = 0
EMPTY = 0
"""Value of memory that was never written, or zeroed."""
GARBAGE = -1
"""Value left by a failed copy, and by a forward pass that read a wrong one."""


class Violation(AssertionError):
    """A broken invariant.

    Args:
        kind: Which one: `device` or `host` (memory differs from its key), `read`
            (a forward pass reads a wrong value), `tokens`, `refs`, `slots`,
            `plan`, `stuck`, `unmapped` (somebody touches what has no memory).
        message: What was found.

    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"[{kind}] {message}")
        self.kind = kind


class Sequence:
    """Tokens of a request, and the value of each in each group."""

    __slots__ = ("_chain", "_epoch", "tokens", "values")

    def __init__(
        self, root: int, num_groups: int, epoch: int, tokens: list[int]
    ) -> None:
        self._chain = root
        self._epoch = epoch
        self.tokens: list[int] = []
        self.values: list[list[int]] = [[] for _ in range(num_groups)]
        """`values[group][position]`."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self._chain = hash((self._chain, token))
        self.tokens.append(token)
        for group, values in enumerate(self.values):
            values.append(hash((self._chain, group, self._epoch)))

    def next_token(self) -> int:
        """What the model samples after all tokens, with any weights."""
        return hash((self._chain, -2)) % VOCAB

    def copy(self) -> "Sequence":
        new = object.__new__(Sequence)
        new._chain, new._epoch = self._chain, self._epoch
        new.tokens = self.tokens.copy()
        new.values = [values.copy() for values in self.values]
        return new
