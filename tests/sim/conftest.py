# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Failed resets and copies are part of the scripts: no log line for each."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
