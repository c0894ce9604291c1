# SPDX-License-Identifier: Apache-2.0
"""What does not go together with device memory that is given back."""

import pytest

from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_tier import compatibility
from vllm.v1.kv_tier.config import KVTierConfig

from .test_config import _v1 as _v1
from .test_config import engine_config, names_all
from .test_config import model as model


@pytest.fixture
def elastic(model: str, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Settings of an engine that gives memory back, on a CUDA GPU with kvcached."""
    config = engine_config(model, kv_offloading_config={"shrink_after_s": 1})
    config.parallel_config.distributed_executor_backend = "uni"
    for name in ("is_cpu", "is_cuda_alike", "is_cuda"):
        says = name != "is_cpu"
        monkeypatch.setattr(type(current_platform), name, lambda self, s=says: s)
    monkeypatch.setattr(compatibility, "find_spec", lambda name: name)
    return config


def test_memory_of_a_gpu_is_given_back(elastic: VllmConfig) -> None:
    assert KVTierConfig.from_vllm_config(elastic)


def refused(config: VllmConfig, *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "shrink_after_s", *parts)


def test_memory_is_given_back_on_cpus_and_cuda(
    elastic: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    refused(elastic, "works on CPUs and on CUDA, not on", "Remove shrink")


def test_memory_of_a_gpu_needs_kvcached(
    elastic: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "find_spec", lambda name: None)
    refused(elastic, "not installed", "pip install kvcached")


@pytest.mark.parametrize(
    "name, value", [("world_size", 2), ("distributed_executor_backend", "mp")]
)
def test_memory_of_a_gpu_is_mapped_by_the_scheduler(
    elastic: VllmConfig, name: str, value: object
) -> None:
    setattr(elastic.parallel_config, name, value)
    mend = "with --distributed-executor-backend uni"
    refused(elastic, "engines with one rank", str(value), mend)


def test_memory_of_a_gpu_is_taken_once(elastic: VllmConfig) -> None:
    elastic.model_config.enable_sleep_mode = True
    refused(elastic, "--enable-sleep-mode", "Remove one of them")


def test_connectors_register_the_memory_of_a_gpu(elastic: VllmConfig) -> None:
    elastic.kv_transfer_config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both"
    )
    refused(elastic, "--kv-transfer-config", "'NixlConnector'", "Remove one of them")
