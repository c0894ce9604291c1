# SPDX-License-Identifier: Apache-2.0
"""Every setting of this release changes the name of KV, but those that are listed."""

import dataclasses
import fnmatch
import json
import os
from pathlib import Path
from typing import Any

import pytest

import vllm.config
import vllm.envs
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.stores.identity import (
    HARMLESS,
    VARIABLES,
    is_harmless_file,
    namespace,
)
from vllm.v1.kv_tier.worker.secondary import describe

from ...e2e.model import make_llama
from .test_identity import NUM_BLOCKS, name_of, one_seed, settings, worker

__all__ = ["one_seed"]

# The first and the last release that has a field.
RELEASES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "harmless_fields.json").read_text()
)


def fields_of(name: str) -> set[str]:
    """Of upstream's class in this release; none if there is no such class."""
    found = getattr(vllm.config, name, None)
    return {f.name for f in dataclasses.fields(found)} if found else set()


def all_configs() -> list[str]:
    """Names of upstream's configuration classes, with those that are fields of them."""
    names = {
        name
        for name, value in vars(vllm.config).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    }
    return sorted(names - {"VllmConfig"})


def version(tag: str) -> list[int]:
    return [int(part) for part in tag[1:].split(".")]


def test_the_list_names_fields_that_a_release_has() -> None:
    assert {c: set(f) for c, f in RELEASES.items()} == {
        c: set(f) for c, f in HARMLESS.items()
    }
    tag = os.environ.get("KV_TIER_TAG", "v0.32.0")
    for name, harmless in HARMLESS.items():
        said = {
            field
            for field, (first, last) in RELEASES[name].items()
            if version(first) <= version(tag) <= version(last)
        }
        assert said == fields_of(name) & set(harmless), name
    assert all(reason for fields in HARMLESS.values() for reason in fields.values())


def name_with(folder: Path, **values: Any) -> str:
    config, kv = settings(folder)
    vars(config).update(values)
    return namespace(config, kv, "v0.32.0")


@pytest.mark.parametrize("name", all_configs())
def test_each_field_changes_the_name_until_somebody_lists_it(
    name: str, tmp_path: Path
) -> None:
    kind = getattr(vllm.config, name)
    config = object.__new__(kind)
    fields = sorted(fields_of(name))
    for field in fields:
        object.__setattr__(config, field, None)
    before = name_with(tmp_path, additional_config=config)
    counts = set()
    for field in fields:
        object.__setattr__(config, field, "another value")
        if name_with(tmp_path, additional_config=config) != before:
            counts.add(field)
        object.__setattr__(config, field, None)
    assert counts == set(fields) - set(HARMLESS.get(name, {}))


def test_each_configuration_counts_until_somebody_lists_it(tmp_path: Path) -> None:
    # These cannot be another value: their fields can.
    parts = {"model_config", "cache_config", "load_config", "speculative_config"}
    before = name_with(tmp_path)
    for field in fields_of("VllmConfig") - parts:
        changed = name_with(tmp_path, **{field: "another value"}) != before
        assert changed == (field not in HARMLESS["VllmConfig"]), field


COUNTS = [
    *("VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE", "VLLM_ATTENTION_BACKEND"),
    *("VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_CPU_INT4_W4A8", "VLLM_USE_DEEP_GEMM"),
    *("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_PLUGINS"),
    *("VLLM_OF_A_LATER_RELEASE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"),
]
DO_NOT = [
    *("VLLM_PORT", "VLLM_HOST_IP", "VLLM_DP_RANK", "VLLM_API_KEY", "VLLM_CACHE_ROOT"),
    *("VLLM_LOGGING_LEVEL", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_DIST_IDENT"),
    # Kubernetes tells each container of each service.
    *("VLLM_SERVICE_HOST", "VLLM_QWEN_PORT_8000_TCP_ADDR", "VLLM_QWEN_SERVICE_PORT"),
    *("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK"),
]


@pytest.mark.parametrize("variable", [*COUNTS, *DO_NOT])
def test_the_environment_counts_but_for_what_is_listed(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the scheduler's process and in a rank's, which may be on another machine."""

    def names() -> tuple[str, list[object]]:
        return name_of(tmp_path), describe(worker(), NUM_BLOCKS)

    monkeypatch.setenv(variable, "1")
    first = names()
    monkeypatch.setenv(variable, "2")
    second = names()
    assert names() == second
    changed = [a != b for a, b in zip(first, second)]
    assert changed == [variable in COUNTS] * 2


def test_a_file_that_a_variable_names_counts_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tmp_path / "tuned.json"
    names = []
    monkeypatch.setenv("VLLM_HUMMING_INPUT_QUANT_CONFIG", str(tuned))
    for content in ("a", "b", "a"):
        tuned.write_text(content)
        names.append(name_of(tmp_path / "model"))
    assert names[0] == names[2] != names[1]


def test_each_reason_has_variables_of_some_release() -> None:
    known = set(vllm.envs.environment_variables)
    for reason, patterns in VARIABLES.items():
        assert reason and any(
            fnmatch.fnmatchcase(name, pattern)
            for name in known
            for pattern in patterns.split()
        ), reason


FILES = {
    "quantize_config.json": (True, True),
    "model.safetensors.index.json": (True, True),
    "modeling.py": (True, True),
    "preprocessor_config.json": (True, True),
    "a file of a later release": (True, True),
    # A text model's keys are tokens; a processor makes inputs with these.
    "tokenizer.json": (False, True),
    "chat_template.jinja": (False, True),
    "config.json": (False, True),
    "README.md": (False, False),
    "generation_config.json": (False, False),
    ".gitattributes": (False, False),
}


@pytest.mark.parametrize("file", FILES)
def test_files_count_but_for_those_that_are_listed(file: str, tmp_path: Path) -> None:
    text, multimodal = FILES[file]
    assert is_harmless_file(file, multimodal=False) is not text
    assert is_harmless_file(file, multimodal=True) is not multimodal
    before = name_of(tmp_path / "model")
    (tmp_path / "model" / file).write_text("[]")
    assert (name_of(tmp_path / "model") != before) == text


class Custom:
    """Without a text of its own."""


@pytest.mark.parametrize("value", [Custom(), lambda: None])
def test_a_setting_without_a_text_of_its_own_is_refused(
    value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="the setting additional_config.*Remove that"):
        name_with(tmp_path, additional_config={"a": value})


def test_a_file_that_a_setting_names_counts_by_its_bytes(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    names = []
    for text in ("1", "2", "1"):
        scales.write_text(text)
        names.append(name_with(tmp_path / "m", additional_config={"a": str(scales)}))
    assert names[0] == names[2] != names[1]


# What differs between engines of a deployment that share a store.
OPERATION: list[dict[str, Any]] = [
    {"gpu_memory_utilization": 0.5, "max_num_seqs": 3, "max_num_batched_tokens": 512},
    {"seed": 7, "served_model_name": ["a", "b"]},
    {"num_gpu_blocks_override": 99, "kv_offloading_size": 0.25},
    {"async_scheduling": False, "distributed_executor_backend": "mp"},
    {"max_logprobs": 3, "disable_log_stats": True, "generation_config": "vllm"},
]
SHAPE: list[dict[str, Any]] = [
    {"max_model_len": 512},
    {"dtype": "bfloat16"},
    {"block_size": 32},
    {"enable_lora": True},
    {"hf_overrides": {"rms_norm_eps": 1e-3}},
    # A compiler's options and passes may do anything.
    {"compilation_config": {"inductor_compile_config": {"max_autotune": True}}},
]


@pytest.mark.skipif(not keys_are_bytes(), reason="has no secondary tiers")
def test_engines_of_a_deployment_share_and_others_do_not(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model")
    _, kv = settings(tmp_path / "other")
    known = {field.name for field in dataclasses.fields(EngineArgs)}

    def name(**changes: Any) -> str:
        args = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True}
        args |= {"model": str(model), "block_size": 16, "kv_offloading_size": 0.05}
        args |= {"kv_offloading_backend": "core", "skip_tokenizer_init": True}
        made = {k: v for k, v in (args | changes).items() if k in known}
        config = EngineArgs(**made).create_engine_config(UsageContext.LLM_CLASS)
        return namespace(config, kv, "v0.32.0")

    before = name()
    assert name() == before
    assert [name(**changes) for changes in OPERATION] == [before] * len(OPERATION)
    shaped = [name(**changes) for changes in SHAPE if changes.keys() <= known]
    assert len({before, *shaped}) == 1 + len(shaped)
