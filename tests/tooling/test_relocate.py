# SPDX-License-Identifier: Apache-2.0
"""Where a change belongs in another release: the right place, or none."""

from textwrap import dedent

import pytest

from patchtool.config import ToolError
from patchtool.hunks import apply, diff, parse_diff
from patchtool.relocate import Placement, Relocator

OLD = dedent("""\
    import os

    from vllm.a import A
    from vllm.z import Z


    class Engine:
        size: int = 1

        def __init__(self) -> None:
            self.first = 1
            self.second = 2

        def step(self, queue: list[int]) -> int:
            while queue:
                item = queue.pop()
                if item is None:
                    self.skip(item)
                    continue
                self.run(item)
            return self.first

        def stop(self) -> int:
            self.run(None)
            return self.first
    """)


def place(after: str, new: str, old: str = OLD) -> tuple[list[Placement], str]:
    """Carry what makes `after` of `old` to `new`."""
    text = diff({"e.py": old}, {"e.py": after})
    edits = parse_diff(text)
    relocator = Relocator("e.py", old, after, new)
    places = relocator.place(edits)
    return places, relocator.result(places)


def add(text: str, behind: str, lines: str) -> str:
    assert text.count(behind) == 1
    return text.replace(behind, behind + lines)


def test_what_did_not_change_is_exact() -> None:
    after = add(OLD, "            item = queue.pop()\n", "            seam()\n")
    new = "# More\n" + OLD.replace("return self.first", "return self.second")
    (found,), result = place(after, new)
    assert found.exact and found.scope == "Engine.step"
    assert result == add(
        new, "            item = queue.pop()\n", "            seam()\n"
    )


def test_the_same_lines_of_another_function_do_not_count() -> None:
    after = OLD.replace(
        "        self.run(None)\n        return",
        "        self.run(None)\n        s()\n        return",
    )
    # In `stop` the lines are gone, and `step` has them now.
    new = OLD.replace("        self.run(None)\n", "").replace(
        "            self.run(item)\n",
        "            self.run(item)\n        self.run(None)\n",
    )
    (found,), result = place(after, new)
    assert found.scope == "Engine.stop" and not found.exact
    assert result == new.replace(
        "def stop(self) -> int:\n", "def stop(self) -> int:\n        s()\n"
    )


def test_lines_between_neighbours_stop_a_call_and_not_an_attribute() -> None:
    call = add(OLD, "                self.skip(item)\n", "                seam(item)\n")
    new = add(OLD, "                self.skip(item)\n", "                count(item)\n")
    (found,), result = place(call, new)
    assert found.at is None and "between its neighbours" in found.why
    assert result == new

    attribute = add(OLD, "        self.first = 1\n", "        self.seam = None\n")
    new = add(OLD, "        self.first = 1\n", "        self.other = 3\n")
    (found,), result = place(attribute, new)
    assert found.at is not None and not found.exact
    assert result == add(new, "        self.first = 1\n", "        self.seam = None\n")


def test_one_neighbour_is_enough_and_none_is_not() -> None:
    after = add(OLD, "            item = queue.pop()\n", "            seam(item)\n")
    new = OLD.replace("if item is None:", "if self.is_over(item):")
    (found,), result = place(after, new)
    assert found.at is not None and "what follows" in found.why
    assert result == add(
        new, "            item = queue.pop()\n", "            seam(item)\n"
    )
    (found,), _ = place(after, new.replace("queue.pop()", "queue.pop(0)"))
    assert found.at is None and "both neighbours" in found.why


def test_another_block_is_refused() -> None:
    after = add(
        OLD, "                self.skip(item)\n", "                seam(item)\n"
    )
    # The neighbours are there as they were, but the loop is gone.
    new = OLD.replace("        while queue:\n", "        for queue in [queue]:\n")
    (found,), result = place(after, new)
    assert found.at is None and "it stood in" in found.why
    assert result == new


def test_a_condition_that_changed_is_to_be_looked_at() -> None:
    after = add(
        OLD, "                self.skip(item)\n", "                seam(item)\n"
    )
    new = OLD.replace("        while queue:\n", "        while queue and self.first:\n")
    (found,), result = place(after, new)
    assert found.at is not None and not found.exact and "its block was" in found.why
    assert "seam(item)" in result


def test_replaced_lines_must_be_there() -> None:
    line = "            self.run(item)\n"
    after = OLD.replace(line, "            self.go(item)\n")
    (found,), result = place(
        after, OLD.replace(line, "            self.run(item, 1)\n")
    )
    assert found.at is None and "lines that it replaces" in found.why
    # The one in its old place, though there is another.
    new = add(OLD, "        while queue:\n", line)
    (found,), result = place(after, new)
    assert result == add(after, "        while queue:\n", line)


def test_lines_to_remove_may_begin_with_a_blank_one() -> None:
    old = add(OLD, "        self.run(None)\n", "\n        self.first = 2\n")
    (found,), result = place(OLD, "# More\n" + old, old)
    assert found.exact and result == "# More\n" + OLD


def test_a_scope_that_is_gone() -> None:
    after = add(OLD, "        self.run(None)\n", "        seam()\n")
    (found,), _ = place(after, OLD.replace("def stop", "def end"))
    assert found.at is None and found.why == "there is no Engine.stop"


def test_imports_keep_their_order() -> None:
    after = add(OLD, "from vllm.a import A\n", "from vllm.kv import K\n")
    new = add(
        OLD, "from vllm.a import A\n", "from vllm.b import B\nfrom vllm.y import Y\n"
    )
    (found,), result = place(after, new)
    assert found.why == "an import, in its order"
    assert result == add(new, "from vllm.b import B\n", "from vllm.kv import K\n")


def test_a_function_at_the_end_of_a_class() -> None:
    tail = "\n    def seam(self) -> None:\n        pass\n"
    new = OLD.replace("        return self.first\n", "        return self.second\n")
    new += "\n    def more(self) -> None:\n        pass\n"
    (found,), result = place(OLD + tail, new)
    assert found.scope == "Engine" and found.at is not None
    assert "    def seam(self) -> None:\n        pass\n" in result
    compile(result, "e.py", "exec")


@pytest.mark.parametrize(
    "old, new",
    [
        ("a\nb\nc\n", "a\nx\nc\n"),
        ("a\nb\n", "b\n"),
        ("a\n", "a\nb\nc\n"),
        (None, "a\n"),
    ],
)
def test_a_diff_read_and_made_again(old: str | None, new: str) -> None:
    assert apply({"f": old}, parse_diff(diff({"f": old}, {"f": new}))) == {"f": new}


def test_an_edit_of_other_lines_is_refused() -> None:
    edits = parse_diff(diff({"f": "a\nb\n"}, {"f": "a\nc\n"}))
    with pytest.raises(ToolError, match="f:2 has other lines"):
        apply({"f": "a\nx\n"}, edits)


def test_a_field_goes_behind_those_of_upstream() -> None:
    """Callers may name them by position."""
    after = add(OLD, "    size: int = 1\n", "    seam: int = 0\n")
    new = add(OLD, "    size: int = 1\n", "    other: int = 2\n    more: int = 3\n")
    (found,), result = place(after, new)
    assert found.at is not None
    assert result == add(new, "    more: int = 3\n", "    seam: int = 0\n")
