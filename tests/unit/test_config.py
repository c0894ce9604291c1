# SPDX-License-Identifier: Apache-2.0
"""Every wrong setting gives one clear message, through the real engine config."""

import json
import logging
import math
import os
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.config import (
    DebugConfig,
    GiB,
    KVTierConfig,
    check_memory_of_engines,
    tier_config,
)
from vllm.v1.kv_tier.memory import limits
from vllm.v1.kv_tier.options import keys_of
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.stores.settings import store_types

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
        secondary_tiers=(),
        share_replicas=False,
        quotas=None,
        shrink_after_s=None,
        eviction_policy="proven",
        debug=DebugConfig(
            store_policy="write_back",
            store_from_use="auto",
            max_load_stall_ms=2.0,
            copy_engine="auto",
            layerwise_loads=True,
            meet=False,
            verify=False,
            check_memory=True,
        ),
    )


DIRECTORY: dict[str, Any] = {"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}
DEBUG: dict[str, Any] = {
    "store_policy": "write_through",
    "store_from_use": 2,
    "max_load_stall_ms": 0.25,
    "copy_engine": "dma",
    "layerwise_loads": False,
    "meet": True,
    "verify": True,
    "check_memory": False,
}


def test_every_key_is_taken(model: str) -> None:
    options = {
        "secondary_tiers": [DIRECTORY],
        "share_replicas": True,
        "quotas": {"tenant-a": 0.5},
        "shrink_after_s": 5.0,
        "eviction_policy": "arc",
        "debug": DEBUG,
    }
    # With a pool most are refused.
    others_of_config = {"size_bytes", "pool"}
    assert options.keys() == {f.name for f in fields(KVTierConfig)} - others_of_config
    assert DEBUG.keys() == {f.name for f in fields(DebugConfig)}
    # Not all releases take it.
    if not keys_are_bytes():
        del options["secondary_tiers"]
    found = tier(model, kv_offloading_config=options)
    stores = [FsConfig(root_dir="/mnt/kv", max_gib=200)] * (
        "secondary_tiers" in options
    )
    others = options | {"secondary_tiers": tuple(stores), "debug": DebugConfig(**DEBUG)}
    assert found == KVTierConfig(GiB // 2, **others)
    assert found == tier_config(engine_config(model, kv_offloading_config=options))


def test_few_keys_are_outside_of_debug() -> None:
    entries = {
        key for store in store_types().values() for key in keys_of(store, "index")
    }
    keys = {*keys_of(KVTierConfig, "size_bytes"), *entries} - {"debug"}
    assert len(keys) <= 13


def test_old_places_are_accepted_with_one_warning(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {**DEBUG, "eviction_policy": "arc"}
    if keys_are_bytes():
        options["secondary_tiers"] = [DIRECTORY | {"flush_s": 7}]
    with caplog.at_level(logging.WARNING, logger="vllm.v1.kv_tier"):
        found = tier(model, kv_offloading_config=options)
    assert found is not None and found.debug == DebugConfig(**DEBUG)
    assert [store.debug.flush_s for store in found.secondary_tiers] == [7] * bool(
        found.secondary_tiers
    )
    (line,) = {r.getMessage() for r in caplog.records if "debug" in r.getMessage()}
    for key in DEBUG:
        assert f" debug.{key}" in line
    assert ("secondary_tiers[0].debug.flush_s" in line) == keys_are_bytes()
    assert "in this version only" in line


def test_a_setting_in_both_places(model: str) -> None:
    text = message(
        model, kv_offloading_config={"verify": True, "debug": {"verify": False}}
    )
    names_all(text, "verify is given in debug and outside of it", "Keep the one in deb")


def test_a_process_parses_once(model: str) -> None:
    config = engine_config(model, kv_offloading_config={"debug": {"verify": True}})
    found = tier_config(config)
    assert found is not None and tier_config(config) is found
    # What is changed later counts.
    config.cache_config.kv_offloading_config["debug"]["verify"] = False
    again = tier_config(config)
    assert again is not None and not again.debug.verify


def test_settings_are_the_same_in_another_process(model: str) -> None:
    config = engine_config(model, kv_offloading_config={"debug": DEBUG})
    assert pickle.loads(pickle.dumps(tier_config(config))) == tier_config(config)


@pytest.mark.parametrize(
    "limit, seconds", [(0, 0.0), (2, 0.002), (2.5, 0.0025), (None, math.inf)]
)
def test_limits_of_a_stall(model: str, limit: float | None, seconds: float) -> None:
    found = tier(model, kv_offloading_config={"debug": {"max_load_stall_ms": limit}})
    assert found is not None and found.max_load_stall_s == seconds


@pytest.mark.parametrize(
    "flags",
    [
        ["", '{"eviction_policy": "arc", "debug": {"copy_engine": "dma"}}'],
        [".eviction_policy", "arc", ".debug.copy_engine", "dma"],
    ],
    ids=["JSON", "dots"],
)
def test_settings_from_the_command_line(model: str, flags: list[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    keys, values = flags[::2], flags[1::2]
    flags = ["--kv-offloading-size", "0.25", "--kv-offloading-backend", "core"]
    for key, value in zip(keys, values):
        flags += [f"--kv-offloading-config{key}", value]
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    args.skip_tokenizer_init = True
    args.kv_cache_memory_bytes = 1 << 20
    found = KVTierConfig.from_vllm_config(args.create_engine_config())
    debug = DebugConfig(copy_engine="dma")
    assert found == KVTierConfig(GiB // 4, eviction_policy="arc", debug=debug)


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
    options = {"debug": {"check_memory": False}}
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
    names_all(text, '{"debug": {"check_memory": false}}')


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

WRONG_NUMBERS: list[tuple[Any, str]] = [
    (-1.5, "0 or more"),
    ("2", "a number"),
    (True, "a number"),
    (math.nan, "a finite number"),
    (math.inf, "a finite number"),
]


@pytest.mark.parametrize(
    "options",
    [
        {"shrink_after_s": None},
        {"quotas": {"a": 1}},
        {"quotas": {}},
        {"quotas": {"a": 0.5, "b": 0.5}},
        {"quotas": {"c" * 256: 1e-3}},
    ],
    ids=lambda options: str(options)[:30],
)
def test_a_right_option(model: str, options: dict[str, Any]) -> None:
    found = tier(model, kv_offloading_config=options)
    assert found is not None
    assert {key: getattr(found, key) for key in options} == options


@pytest.mark.parametrize(
    "options, parts",
    [
        (
            {"evictoin_policy": "arc"},
            [
                "unknown key 'evictoin_policy'.",
                "Did you mean eviction_policy?",
                "Known keys: secondary_tiers",
            ],
        ),
        ({"copy_engin": "dma"}, ["Did you mean debug.copy_engine?"]),
        (
            {"debug": {"verfy": 1}},
            [": debug: unknown key 'verfy' (value 1).", "verify?"],
        ),
        ({"debug": {"quotas": {}}}, ["debug: unknown key 'quotas'", "mean quotas?"]),
        ({"size_bytes": 5}, ["unknown key 'size_bytes' (value 5)"]),
        ({"debug": None}, ["debug must be an object, got None"]),
        *(
            (
                {"debug": {"store_policy": value}},
                [
                    ": debug.store_policy must be 'write_back' or 'write_through', "
                    f"got {said}"
                ],
            )
            for value, said in (
                ("write_behind", "'write_behind'"),
                (None, "None"),
                (["write_back"], "a list"),
            )
        ),
        *(
            (
                {"debug": {"store_from_use": value}},
                [
                    "debug.store_from_use must be a whole number from 1",
                    f"got {value!r}",
                ],
            )
            for value in (0, 1.5, True, "all", None)
        ),
        (
            {"eviction_policy": "newest"},
            ["unknown eviction_policy 'newest'", "one of s3fifo, lru, arc, proven"],
        ),
        ({"eviction_policy": 3}, ["unknown eviction_policy 3"]),
        ({"eviction_policy": ["lru"]}, ["unknown eviction_policy ['lru']"]),
        ({"eviction_policy": "no.Such"}, ["'no.Such' cannot be imported"]),
        *(
            (
                {"debug": {"max_load_stall_ms": value}},
                [f"debug.max_load_stall_ms must be {word}, got {value!r}"],
            )
            for value, word in WRONG_NUMBERS
        ),
        *(
            (
                {"shrink_after_s": value},
                [f"shrink_after_s must be {word}, got {value!r}"],
            )
            for value, word in WRONG_NUMBERS
        ),
        (
            {"debug": {"copy_engine": "cuda"}},
            [
                "debug.copy_engine must be 'auto', 'dma', 'kernel' or 'torch', "
                "got 'cuda'"
            ],
        ),
        ({"debug": {"layerwise_loads": 1}}, ["layerwise_loads must be true or false"]),
        ({"load_budget_gib": 2}, ["unknown key 'load_budget_gib'"]),
        ({"debug": {"check_memory": "no"}}, ["must be true or false, got 'no'"]),
        ({"share_replicas": 1}, ["share_replicas must be true or false, got 1"]),
        ({"keep_while_asleep": True}, ["(value True) was removed", "Take the key out"]),
        ({"keep_while_asleep": False}, ["keep_while_asleep (value False) was removed"]),
        ({"secondary_tiers": {"type": "fs"}}, ["secondary_tiers must be a list"]),
        ({"quotas": ["a"]}, ["quotas must be an object", "got a list"]),
        ({"quotas": 0.5}, ["quotas must be an object, got 0.5"]),
        ({"quotas": {str(i): 0.001 for i in range(101)}}, ["have 100 entries or less"]),
        (
            {"quotas": {"": 0.5}},
            ["quotas: a name must have 1 characters or more", "''"],
        ),
        ({"quotas": {"c" * 257: 0.5}}, ["a name must have 256 characters or less"]),
        ({"quotas": {"a": 0}}, [": quotas.a must be above 0, got 0"]),
        (
            {"quotas": {"tenant-a": 1.5}},
            ["quotas['tenant-a'] must be 1 or less, got 1.5"],
        ),
        ({"quotas": {"a": True}}, ["quotas.a must be a number, got True"]),
        ({"quotas": {"a": "half"}}, ["quotas.a must be a number, got 'half'"]),
        ({"quotas": {"a": math.nan}}, ["quotas.a must be a finite number, got nan"]),
        (
            {"quotas": {"a": 0.75, "b": 0.5}},
            ["quotas are 1.25 of the slots together", "at most 1"],
        ),
        ({"quotas": {"a": {1}}}, ["must be JSON", "not JSON serializable"]),
    ],
    ids=str,
)
def test_a_wrong_option(model: str, options: dict[str, Any], parts: list[str]) -> None:
    text = message(model, kv_offloading_config=options)
    names_all(text, "--kv-offloading-config", *parts)


def test_each_wrong_option_has_a_line(model: str) -> None:
    debug = {"verify": 1, "store_policy": "no"}
    text = message(model, kv_offloading_config={"debug": debug, "share_replica": True})
    lines = [line for line in text.splitlines() if "--kv-offloading-config: " in line]
    assert len(lines) == 3
    names_all(text, "debug.verify", "debug.store_policy", "Did you mean share_replicas")


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


# --------------------------------------------------------------------- one pool

POOL = {"kv_offloading_config": {"pool": "/run/pool.sock"}, "kv_offloading_size": None}


@pytest.mark.skipif(not keys_are_bytes(), reason="keys are not the same everywhere")
def test_pool_takes_the_place_of_the_size(model: str) -> None:
    config = tier(model, **POOL)
    assert config is not None and config.pool == "/run/pool.sock"
    text = message(model, **POOL | {"kv_offloading_size": 3})
    names_all(text, "pool '/run/pool.sock'", "--kv-offloading-size 3", "Remove one")


@pytest.mark.skipif(not keys_are_bytes(), reason="keys are not the same everywhere")
@pytest.mark.parametrize(
    "remove, settings, args",
    [
        ("share_replicas", {"share_replicas": True}, {}),
        ("shrink_after_s", {"shrink_after_s": 1.0}, {}),
        (
            "secondary_tiers with several ranks",
            {"secondary_tiers": [{"type": "fs", "root_dir": "/x", "max_gib": 1}]},
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        ),
    ],
)
def test_pool_refuses_what_was_not_run_with_it(
    model: str, remove: str, settings: dict[str, Any], args: dict[str, Any]
) -> None:
    config = POOL["kv_offloading_config"] | settings  # type: ignore[operator]
    text = message(model, **POOL | args | {"kv_offloading_config": config})
    names_all(text, "pool has not been run with", f"Remove {remove}, or pool.")


@pytest.mark.skipif(not keys_are_bytes(), reason="keys are not the same everywhere")
@pytest.mark.parametrize("describes", [True, False])
def test_pool_needs_events_that_describe_hits(
    model: str, describes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "describes_hits", lambda: describes)
    events = KVEventsConfig(enable_kv_cache_events=True)
    if describes:
        assert engine_config(model, **POOL, kv_events_config=events)
        return
    text = message(model, **POOL, kv_events_config=events)
    names_all(text, "pool is not supported with KV events", "Remove one of the two.")
