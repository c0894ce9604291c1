# SPDX-License-Identifier: Apache-2.0
"""The overlay of this checkout is the same on every tag."""

from __future__ import annotations

import pytest

from patchtool.check import VERSION_CHECK
from patchtool.config import Layout, overlay_files
from patchtool.tagspage import PAGE, README, load_results, page, readme


@pytest.mark.parametrize("name", overlay_files(Layout.default()))
def test_no_overlay_file_looks_at_a_version(name: str) -> None:
    text = overlay_files(Layout.default())[name].read_text()
    assert not VERSION_CHECK.search(text)


@pytest.mark.parametrize(
    "code",
    [
        "import vllm\nif vllm.__version__ < '0.20': ...",
        "from vllm import __version_tuple__",
        "from vllm.version import __version__",
        "import importlib.metadata\nimportlib.metadata.version('vllm')",
        "from packaging.version import Version",
    ],
)
def test_a_version_check_is_noticed(code: str) -> None:
    assert VERSION_CHECK.search(code)


def test_the_page_of_releases_is_up_to_date() -> None:
    layout = Layout.default()
    assert (layout.root / PAGE).read_text() == page(layout), "run `make tags-page`"
    assert (layout.root / README).read_text() == readme(layout), "run `make tags-page`"
    assert load_results(layout).keys() == set(layout.tags())
