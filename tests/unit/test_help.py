# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve --help` says."""

import re

import pytest

from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.version import __version__ as VLLM_VERSION

from ..names import FlexibleArgumentParser


@pytest.mark.skipif(
    not hasattr(arg_utils, "_maybe_add_docs_url"), reason="the help has no links"
)
def test_links_are_to_pages_of_upstreams_version() -> None:
    release, _, local = VLLM_VERSION.partition("+")
    assert "core" in local
    options = EngineArgs.add_cli_args(FlexibleArgumentParser())._actions
    text = " ".join(option.help or "" for option in options)
    linked = re.findall(r"docs\.vllm\.ai/en/([^/]+)/api/", text)
    assert set(linked) == {f"v{release}"}
