# SPDX-License-Identifier: Apache-2.0
"""Every wrong setting gives one clear message, through the real engine config."""

import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_tier.config import GiB, KVTierConfig, check_memory_of_engines
from vllm.v1.kv_tier.memory import limits
from vllm.v1.kv_tier.releases import keys_are_bytes

from ..names import FlexibleArgumentParser, KVOffloadingBackend

compat = pytest.mark.compat
HAS_CACHE_SIZE = any(f.name == "kv_cache_memory_bytes" for f in fields(EngineArgs))

OTHERS: list[Any] = [b for b in get_args(KVOffloadingBackend) if b != "core"] or [None]
"""Backends of upstream; the first releases have none."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def _v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases have another engine too, which they may choose by themselves."""
    monkeypatch.setenv("VLLM_USE_V1", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def engine_config(model: str, **settings: Any) -> VllmConfig:
    args = {
        "model": model,
        "skip_tokenizer_init": True,
        "kv_offloading_backend": "core",
        "kv_offloading_size": 0.5,
        **settings,
    }
    if HAS_CACHE_SIZE:
        args["kv_cache_memory_bytes"] = 1 << 20
    return EngineArgs(**args).create_engine_config()


def tier(model: str, **settings: Any) -> KVTierConfig | None:
    return KVTierConfig.from_vllm_config(engine_config(model, **settings))


def message(model: str, **settings: Any) -> str:
    """The one error that the settings give."""
    with pytest.raises(ValueError) as error:
        engine_config(model, **settings)
    return str(error.value)


def names_all(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


# ------------------------------------------------------------------------- good


def test_defaults(model: str) -> None:
    assert tier(model) == KVTierConfig(
        size_bytes=GiB // 2,
        store_policy="write_back",
        store_from_use="auto",
        eviction_policy="proven",
        max_load_stall_ms=2.0,
        copy_engine="auto",
        layerwise_loads=True,
        verify=False,
        check_memory=True,
    )


def test_every_key_is_taken(model: str) -> None:
    options = {
        "store_policy": "write_through",
        "store_from_use": 2,
        "eviction_policy": "arc",
        "max_load_stall_ms": 0.25,
        "copy_engine": "dma",
        "layerwise_loads": False,
        "verify": True,
        "share_replicas": True,
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}],
        "quotas": {"tenant-a": 0.5},
        "shrink_after_s": 5.0,
        "keep_while_asleep": True,
        "check_memory": False,
    }
    # Not all releases take the first, which the second cannot stand beside.
    left: dict[str, Any] = {"keep_while_asleep": False}
    if not keys_are_bytes():
        left = {"secondary_tiers": None}
    taken = {key: value for key, value in options.items() if key not in left}
    found = tier(model, kv_offloading_config=taken)
    assert found == KVTierConfig(size_bytes=GiB // 2, **options | left)
    assert options.keys() == {f.name for f in fields(KVTierConfig)} - {"size_bytes"}


@pytest.mark.parametrize(
    "limit, seconds", [(0, 0.0), (2, 0.002), (2.5, 0.0025), (None, math.inf)]
)
def test_limits_of_a_stall(model: str, limit: float | None, seconds: float) -> None:
    found = tier(model, kv_offloading_config={"max_load_stall_ms": limit})
    assert found is not None and found.max_load_stall_s == seconds


def test_settings_from_the_command_line(model: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--kv-offloading-size", "0.25", "--kv-offloading-backend", "core"]
    flags += ["--kv-offloading-config", '{"eviction_policy": "arc"}']
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    args.skip_tokenizer_init = True
    args.kv_cache_memory_bytes = 1 << 20
    found = KVTierConfig.from_vllm_config(args.create_engine_config())
    assert found == KVTierConfig(size_bytes=GiB // 4, eviction_policy="arc")


def test_no_tier_without_the_backend(model: str) -> None:
    args = {"kv_offloading_backend": OTHERS[0], "kv_offloading_size": None}
    assert tier(model, **args) is None


def test_the_tier_is_part_of_v1(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (Path(vllm.__file__).parent / "core" / "scheduler.py").exists():
        pytest.skip("this release has no other engine")
    monkeypatch.setenv("VLLM_USE_V1", "0")
    assert tier(model, kv_offloading_backend=None, kv_offloading_size=None) is None
    text = message(model)
    names_all(text, "--kv-offloading-backend core", "VLLM_USE_V1=0", "V1 engine")
    names_all(text, "Set VLLM_USE_V1=1, or remove the backend.")


def test_the_connector_slot_stays_free(model: str) -> None:
    config = engine_config(model)
    assert config.kv_transfer_config is None
    other = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        # Not the default of all releases.
        kv_load_failure_policy="fail",
    )
    assert tier(model, kv_transfer_config=other) is not None


def test_settings_of_the_tier_do_not_change_compiled_graphs(model: str) -> None:
    plain, arc = engine_config(model), {"eviction_policy": "arc"}
    other = engine_config(model, kv_offloading_config=arc)
    assert other.cache_config.compute_hash() == plain.cache_config.compute_hash()


def test_the_memory_check_can_be_turned_off(model: str) -> None:
    options = {"check_memory": False}
    settings = {"kv_offloading_size": 1e6, "kv_offloading_config": options}
    found = tier(model, **settings)
    assert found is not None and found.size_bytes == 10**6 * GiB
    check_memory_of_engines(engine_config(model, **settings), 2)


# ------------------------------------------------------------------------- size


@pytest.mark.parametrize("size", [None, 0, -3, -0.5, math.nan, math.inf])
def test_a_size_that_is_none(model: str, size: float | None) -> None:
    text = message(model, kv_offloading_size=size)
    names_all(text, "--kv-offloading-size", f"got {size}", "Give a size")


@compat("refused at start", "a size that the machine does not have")
def test_a_size_above_the_machines_memory(model: str) -> None:
    text = message(model, kv_offloading_size=1e6)
    names_all(text, "--kv-offloading-size 1e+06", "larger than the memory", "Lower it")
    names_all(text, '{"check_memory": false}')


def test_data_parallel_engines_that_do_not_fit_together(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "available_host_bytes", lambda: 3 * GiB)
    config = engine_config(model, kv_offloading_size=1.25)
    check_memory_of_engines(config, 2)
    with pytest.raises(ValueError) as error:
        check_memory_of_engines(config, 3)
    names_all(str(error.value), "--kv-offloading-size 1.25 does not fit", "3.0 GiB")
    names_all(str(error.value), "each of the 3 data parallel engines", "3.75 GiB")
    # One engine looks when it allocates: memory may still become free until then.
    check_memory_of_engines(engine_config(model, kv_offloading_size=4), 1)
    # The tier is off.
    off = engine_config(model, kv_offloading_backend=OTHERS[0], kv_offloading_size=None)
    check_memory_of_engines(off, 99)


# ----------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "options, parts",
    [
        (
            {"evictoin_policy": "arc"},
            ["unknown key 'evictoin_policy' (value 'arc')", "Known keys: store_policy"],
        ),
        ({"size_bytes": 5}, ["unknown key 'size_bytes'"]),
        (
            {"store_policy": "write_behind"},
            ["unknown store_policy 'write_behind'", "one of write_back, write_through"],
        ),
        ({"store_policy": None}, ["unknown store_policy None"]),
        ({"store_policy": ["write_back"]}, ["unknown store_policy ['write_back']"]),
        ({"store_from_use": 0}, ["store_from_use must be a whole number", "got 0"]),
        ({"store_from_use": 1.5}, ["store_from_use", "got 1.5"]),
        ({"store_from_use": True}, ["store_from_use", "got True"]),
        ({"store_from_use": "all"}, ["store_from_use", '"auto"', "got 'all'"]),
        ({"store_from_use": None}, ["store_from_use", "got None"]),
        (
            {"eviction_policy": "newest"},
            ["unknown eviction_policy 'newest'", "one of s3fifo, lru, arc, proven"],
        ),
        ({"eviction_policy": 3}, ["unknown eviction_policy 3"]),
        ({"eviction_policy": ["lru"]}, ["unknown eviction_policy ['lru']"]),
        ({"eviction_policy": "no.Such"}, ["'no.Such' cannot be imported"]),
        (
            {"max_load_stall_ms": -1.5},
            [
                "max_load_stall_ms must be a number of milliseconds from 0 on",
                "got -1.5",
            ],
        ),
        ({"max_load_stall_ms": "2"}, ["or null (no limit)", "got '2'"]),
        ({"max_load_stall_ms": True}, ["max_load_stall_ms", "got True"]),
        ({"max_load_stall_ms": math.nan}, ["max_load_stall_ms", "got nan"]),
        ({"max_load_stall_ms": math.inf}, ["max_load_stall_ms", "got inf"]),
        (
            {"copy_engine": "cuda"},
            ["unknown copy_engine 'cuda'", "one of auto, dma, kernel, torch"],
        ),
        ({"copy_engine": None}, ["unknown copy_engine None"]),
        ({"copy_engine": ["dma"]}, ["unknown copy_engine ['dma']"]),
        ({"layerwise_loads": 1}, ["layerwise_loads must be true or false", "got 1"]),
        ({"keep_while_asleep": 0}, ["keep_while_asleep must be true", "got 0"]),
        ({"load_budget_gib": 2}, ["unknown key 'load_budget_gib'"]),
        ({"check_memory": "no"}, ["check_memory must be true or false", "got 'no'"]),
        ({"verify": "on"}, ["verify must be true or false", "got 'on'"]),
    ],
    ids=str,
)
def test_a_wrong_option(model: str, options: dict[str, Any], parts: list[str]) -> None:
    text = message(model, kv_offloading_config=options)
    names_all(text, "--kv-offloading-config", *parts)


def test_options_without_the_backend(model: str) -> None:
    options = {"eviction_policy": "arc"}
    for backend in OTHERS:
        size = 0.5 if backend else None
        text = message(
            model,
            kv_offloading_backend=backend,
            kv_offloading_size=size,
            kv_offloading_config=options,
        )
        names_all(text, "--kv-offloading-config {'eviction_policy': 'arc'}")
        names_all(text, repr(backend), "set --kv-offloading-backend core")


@pytest.mark.skipif(OTHERS != [None], reason="this release has a default backend")
def test_a_size_without_a_backend(model: str) -> None:
    text = message(model, kv_offloading_backend=None, kv_offloading_size=0.5)
    names_all(text, "--kv-offloading-size 0.5", "--kv-offloading-backend", "core")


@pytest.mark.parametrize("value", ["[1]", "nonsense", '"lru"', "{"])
def test_options_that_are_no_json_object(
    model: str, value: str, capsys: pytest.CaptureFixture
) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--kv-offloading-size", "0.25", "--kv-offloading-backend", "core"]
    flags += ["--kv-offloading-config", value]
    with pytest.raises((SystemExit, ValueError)) as error:
        args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
        args.create_engine_config()
    text = str(error.value) + capsys.readouterr().err
    assert "kv-offloading-config" in text or "kv_offloading_config" in text


# ----------------------------------------------------------------- combinations


@compat("refused at start", "prefix caching off")
def test_prefix_caching_turned_off(model: str) -> None:
    text = message(model, enable_prefix_caching=False)
    names_all(text, "--kv-offloading-backend core", "--no-enable-prefix-caching")
    names_all(text, "Turn prefix caching on")


@compat("refused at start", "another connector that offloads to host memory")
@pytest.mark.parametrize(
    "connector",
    ["OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1"],
)
def test_a_connector_that_also_offloads(model: str, connector: str) -> None:
    other = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    text = message(model, kv_transfer_config=other)
    names_all(text, "--kv-offloading-backend core", f"kv_connector='{connector}'")
    names_all(text, "Remove one of them")


@compat("refused at start", "another connector that offloads to host memory")
def test_a_connector_inside_a_multi_connector(model: str) -> None:
    inner = [{"kv_connector": n} for n in ("NixlConnector", "OffloadingConnector")]
    other = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": inner},
    )
    text = message(model, kv_transfer_config=other)
    names_all(text, "kv_connector='OffloadingConnector'")


def test_a_connector_that_recomputes_failed_loads(model: str) -> None:
    other = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    config = engine_config(model, kv_transfer_config=other)
    assert KVTierConfig.from_vllm_config(config) is not None


def test_kv_cache_events_can_be_published(model: str) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = KVTierConfig.from_vllm_config(
        engine_config(model, kv_events_config=events)
    )
    assert config is not None


@compat("refused at start", "HiSparse")
def test_hisparse(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model)
    if not hasattr(getattr(config, "attention_config", None), "hisparse_config"):
        pytest.skip("this release has no HiSparse")
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "--kv-offloading-backend core and HiSparse", "Remove")


@compat("refused at start", "platforms other than CUDA, ROCm and CPU")
def test_an_unsupported_platform(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: False)
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "--kv-offloading-backend core runs on CUDA, ROCm")
    names_all(str(error.value), "Remove the backend")
