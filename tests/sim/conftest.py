# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "plants: plants a bug, to show that the checks notice it. They are the same on "
        "each release, and `make test` asks on the first one only",
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Failed resets and copies are part of the scripts: no log line for each."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _no_device() -> Iterator[None]:
    """Threads that a planted deadlock leaves behind may go on when the simulated device
    is gone. Without a real one, a torch that was built for GPUs would crash there."""

    def event(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("There is no device any more.")

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "Event", event)
        yield
