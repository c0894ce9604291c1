# SPDX-License-Identifier: Apache-2.0
"""`scripts/house.py` counts what it says."""

from __future__ import annotations

import pytest

import house

OVERLAY = house.OVERLAY

FILES = {
    f"{OVERLAY}a.py": "from vllm.v1.kv_tier.room import b\nx = getattr(b, 'y', 1)\n",
    f"{OVERLAY}room/b.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from .. import a\n"
        "def hook(scheduler):\n    scheduler.schedule = None\n"
    ),
    f"{OVERLAY}room/releases.py": "x = hasattr(1, 'y')\n",
    f"{OVERLAY}room/__init__.py": "",
    f"{OVERLAY}config.py": (
        "class KVTierConfig:\n    size_bytes: int\n    quotas: dict\n    debug: Debug\n"
        "class FsConfig(StoreConfig):\n    root_dir: str\n    debug: FsDebug\n"
        "class Debug:\n    verify: bool\n"
    ),
    "README.md": "one two three",
    "docs/page.md": "a\nb\n",
}


def test_figures_count_modules_imports_and_documents() -> None:
    figures = house.figures(FILES)
    assert figures["modules"] == 4
    assert figures["modules with one importer"] == 2
    assert figures["getattr on upstream outside of releases"] == 1
    assert figures["settings outside of debug"] == 2
    assert figures["lines of docs"] == 2
    assert figures["words of README"] == 3


def test_imports_for_types_make_a_circle() -> None:
    assert house.circles(house.graph(house.modules(FILES))) == [["a", "room.b"]]


def test_a_method_of_upstream_that_is_replaced_is_named() -> None:
    (place,) = house.replaced_methods(house.modules(FILES))
    assert place == "room.b:5 scheduler.schedule"


def test_a_field_of_the_same_name_as_a_method_is_no_replacement() -> None:
    source = (
        "class A:\n    def end(self): ...\n"
        "class B:\n    def __init__(self):\n        self.end = 1\n"
        "def f(b):\n    b.end = 2\n"
    )
    assert not list(house.replaced_methods({"m": source}))
    own = (
        "class A:\n    def get(self): ...\n    def hide(self):\n        self.get = 1\n"
    )
    assert list(house.replaced_methods({"m": own})) == ["m:4 self.get"]


def test_a_setting_of_the_process_is_restored() -> None:
    source = "@contextmanager\ndef f():\n    sys.setswitchinterval(1)\n    yield\n"
    assert not list(house.replaced_methods({"m": source}))
    found = list(house.replaced_methods({"m": source.replace("@", "#")}))
    assert found == ["m:3 sys.setswitchinterval(1)"]


@pytest.mark.parametrize(
    "source, place",
    [
        ("x = getattr(request, 'y', 1)", "m:1 getattr(request, 'y', 1)"),
        ("x = getattr(self, 'y', 1)", "m:1 getattr(self, 'y', 1)"),
        ("if hasattr(pool, name): ...", "m:1 hasattr(pool, name)"),
        ("try:\n    from vllm.a import b\nexcept ImportError: ...", "m:1 try:"),
        ("with suppress(ImportError):\n    import vllm.a", "m:1 with "),
        ("x = getattr(self, name)", ""),
        ("try:\n    import redis\nexcept ImportError: ...", ""),
        ("try:\n    from vllm.v1.kv_tier import a\nexcept ImportError: ...", ""),
        ("try:\n    from vllm.a import b\nfinally: ...", ""),
    ],
)
def test_what_asks_for_a_release_is_named(source: str, place: str) -> None:
    found = list(house.upstream_lookups({"m": source, "releases": "getattr(a, 'b')"}))
    assert [each[: len(place)] for each in found] == [place] * bool(place)


def test_only_releases_asks_what_upstream_has() -> None:
    """Add a function to `releases` that says which releases have it, and call that."""
    modules = house.modules(house.work_tree())
    assert house.RELEASES in modules
    assert not list(house.upstream_lookups(modules))


def test_no_method_of_another_object_is_replaced() -> None:
    """Add a seam to a patch instead, or let the object take a function."""
    assert not list(house.replaced_methods(house.modules(house.work_tree())))
