# SPDX-License-Identifier: Apache-2.0
"""Whatever shapes the bytes of KV changes the namespace, and nothing else does."""

import copy
import dataclasses
import enum
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.stores.identity import (
    namespace,
    rank_namespace,
    states_before_loading,
)
from vllm.v1.kv_tier.worker.secondary import describe


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which some releases need, and which no release minds."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


class Quant(enum.Enum):
    NONE = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    block_size: int = 16
    num_kv_heads: int = 8
    quant: Quant = Quant.NONE


class HfConfig(Bag):
    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))


def a_config(name: str) -> type[Bag]:
    """A stand-in for upstream's class of that name."""
    return type(name, (Bag,), {})


ModelConfig, CacheConfig = a_config("ModelConfig"), a_config("CacheConfig")
LoadConfig, ParallelConfig = a_config("LoadConfig"), a_config("ParallelConfig")
SpeculativeConfig = a_config("SpeculativeConfig")


def model_in(folder: Path) -> Bag:
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(bytes(300_000))
    (folder / "b.safetensors").write_bytes(b"some weights")
    (folder / "config.json").write_text("{}")
    config = HfConfig(
        _name_or_path=str(folder),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        id2label={0: "A", 1: "B"},
    )
    return ModelConfig(
        model=str(folder),
        revision=None,
        tokenizer=None,
        tokenizer_revision=None,
        hf_config_path=None,
        multimodal_config=None,
        hf_config=config,
        dtype="bfloat16",
        quantization=None,
        max_model_len=4096,
    )


def settings(folder: Path) -> tuple[Bag, Bag]:
    cache = CacheConfig(
        cache_dtype="auto",
        block_size=16,
        prefix_caching_hash_algo="sha256",
        mamba_cache_mode="none",
        num_gpu_blocks=100,
    )
    config = Bag(
        model_config=model_in(folder),
        cache_config=cache,
        load_config=LoadConfig(
            load_format="auto", download_dir=None, model_loader_extra_config=None
        ),
        speculative_config=None,
        parallel_config=ParallelConfig(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
    )
    kv = Bag(
        num_blocks=100,
        kv_cache_groups=[Bag(layer_names=["a"], kv_cache_spec=Spec())],
        kv_cache_tensors=[Bag(size=5, shared_by=["a"])],
    )
    return config, kv


def name_after(folder: Path, change: Callable[[Bag, Bag], object]) -> str:
    config, kv = settings(folder)
    change(config, kv)
    return namespace(config, kv, "v0.32.0")


def name_of(folder: Path) -> str:
    return name_after(folder, lambda config, kv: None)


def flip(config: Bag, file: str, place: int) -> None:
    path = Path(config.model_config.model, file)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def speculate(config: Bag, folder: str, method: str = "eagle") -> Bag:
    draft = model_in(Path(config.model_config.model).parent / folder)
    config.speculative_config = SpeculativeConfig(
        method=method, draft_model_config=draft
    )
    return draft


def set_spec(kv: Bag, **values: object) -> None:
    kv.kv_cache_groups[0].kv_cache_spec = Spec(**values)


SHAPES: dict[str, Callable[[Bag, Bag], object]] = {
    "first byte": lambda c, kv: flip(c, "a.safetensors", 0),
    "last byte": lambda c, kv: flip(c, "a.safetensors", -1),
    "second file": lambda c, kv: flip(c, "b.safetensors", 3),
    "size of weights": lambda c, kv: os.truncate(
        Path(c.model_config.model, "a.safetensors"), 299_999
    ),
    "file's name": lambda c, kv: Path(c.model_config.model, "b.safetensors").rename(
        Path(c.model_config.model, "c.safetensors")
    ),
    # vLLM issue 56311.
    "rope": lambda c, kv: c.model_config.hf_config.rope_parameters.update(
        rope_type="yarn", factor=4.0
    ),
    # vLLM issue 49261. Weights of another one are told by their bytes, too.
    "revision": lambda c, kv: setattr(c.model_config.hf_config, "revision", "other"),
    "dtype": lambda c, kv: setattr(c.model_config, "dtype", "float16"),
    "quantization": lambda c, kv: setattr(c.model_config, "quantization", "fp8"),
    "length": lambda c, kv: setattr(c.model_config, "max_model_len", 8192),
    "draft": lambda c, kv: speculate(c, "draft"),
    "cache dtype": lambda c, kv: setattr(c.cache_config, "cache_dtype", "fp8"),
    "block size": lambda c, kv: setattr(c.cache_config, "block_size", 32),
    "mamba": lambda c, kv: setattr(c.cache_config, "mamba_cache_mode", "align"),
    "spec": lambda c, kv: set_spec(kv, num_kv_heads=4),
    "layers": lambda c, kv: kv.kv_cache_groups[0].layer_names.append("b"),
    # vLLM issue 55191.
    "TP": lambda c, kv: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "PP": lambda c, kv: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "DCP": lambda c, kv: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "seed": lambda c, kv: os.environ.update(PYTHONHASHSEED="7"),
    "algorithm": lambda c, kv: setattr(
        c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_shapes_the_bytes_changes_the_name(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that it is taken back at the end.
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
    before = name_of(tmp_path / "model")
    assert name_after(tmp_path / "model", SHAPES[shape]) != before


def test_the_draft_model_counts_as_the_model_does(tmp_path: Path) -> None:
    def flipped(config: Bag, kv: Bag) -> None:
        draft = speculate(config, "draft")
        flip(Bag(model_config=draft), "a.safetensors", 0)

    same = name_after(tmp_path / "model", lambda c, kv: speculate(c, "draft"))
    assert name_after(tmp_path / "model", lambda c, kv: speculate(c, "draft")) == same
    assert name_after(tmp_path / "model", flipped) != same
    mtp = name_after(tmp_path / "model", lambda c, kv: speculate(c, "draft", "mtp"))
    assert mtp != same


def test_what_does_not_shape_the_bytes_does_not(tmp_path: Path) -> None:
    name = name_of(tmp_path / "model")
    assert len(name) == 32 and int(name, 16)
    # Another place, and more memory.
    assert name_of(tmp_path / "other") == name

    def more(c: Any, kv: Any) -> None:
        kv.num_blocks, c.cache_config.num_gpu_blocks = 7, 1

    assert name_after(tmp_path / "model", more) == name
    assert name_after(tmp_path / "model", lambda c, kv: set_spec(kv)) == name


def test_another_process_finds_the_same_name(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.unit.stores "
        "import test_identity as t; print(t.name_of(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    root = Path(__file__).parents[3]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == name_of(tmp_path / "model")


NUM_BLOCKS = 4


def worker(runner: type = Bag, kv: torch.Tensor | None = None, impl: type = Bag) -> Bag:
    """As much of a worker as its rank's name takes."""
    if kv is None:
        kv = torch.empty(2, NUM_BLOCKS, 16, 8, 4)
    layers = {"model.layers.0.attn": Bag(impl=impl())}
    config = Bag(compilation_config=Bag(static_forward_context=layers))
    model_runner = runner()
    model_runner.kv_caches = [kv]
    return Bag(model_runner=model_runner, vllm_config=config)


def in_module(name: str) -> type:
    """A class of that module."""
    return type("GPUModelRunner", (Bag,), {"__module__": name})


def a_kv(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


WORKERS: dict[str, Callable[[], Bag]] = {
    # vLLM issue 49440.
    "model runner": lambda: worker(in_module("vllm.v1.worker.gpu.model_runner")),
    "attention backend": lambda: worker(impl=type("FlashInferImpl", (Bag,), {})),
    # vLLM issue 55904: the same bytes in another order.
    "layout: heads before tokens": lambda: worker(
        kv=a_kv(2, NUM_BLOCKS, 8, 16, 4).transpose(2, 3)
    ),
    "layout: keys beside values": lambda: worker(
        kv=a_kv(NUM_BLOCKS, 2, 16, 8, 4).transpose(0, 1)
    ),
    "heads of a rank": lambda: worker(kv=a_kv(2, NUM_BLOCKS, 16, 4, 4)),
    "KV dtype": lambda: worker(kv=a_kv(2, NUM_BLOCKS, 16, 8, 4, dtype=torch.half)),
}


@pytest.mark.parametrize("shape", WORKERS)
def test_what_only_a_rank_knows_changes_its_name(shape: str) -> None:
    def name(worker: Bag) -> str:
        return rank_namespace("ab", 0, describe(worker, NUM_BLOCKS))

    assert name(worker()) == name(worker())
    assert name(WORKERS[shape]()) != name(worker())


def test_the_order_of_layers_in_a_slot_is_part_of_a_ranks_name() -> None:
    def name(num_blocks: int, *order: int) -> str:
        # Both layers of a block lie in one run of bytes.
        layers = torch.empty(num_blocks, 2, 15, 8, 4).unbind(1)
        one = worker()
        one.model_runner.kv_caches = [layers[index] for index in order]
        return rank_namespace("ab", 0, describe(one, num_blocks))

    assert name(NUM_BLOCKS, 0, 1) != name(NUM_BLOCKS, 1, 0)
    assert name(NUM_BLOCKS, 0, 1) == name(7 * NUM_BLOCKS, 0, 1)


def test_the_places_of_regions_are_part_of_a_ranks_name() -> None:
    narrow = worker(kv=a_kv(NUM_BLOCKS, 3))
    narrow.model_runner.kv_caches.append(a_kv(NUM_BLOCKS, 3))
    # Each begins at a cache line: with another alignment that is another name.
    assert [[0, 12], [64, 12]] in describe(narrow, NUM_BLOCKS)


def test_the_number_of_blocks_is_no_part_of_a_ranks_name() -> None:
    few, many = (
        describe(worker(kv=a_kv(2, num_blocks, 16, 8, 4)), num_blocks)
        for num_blocks in (NUM_BLOCKS, 7 * NUM_BLOCKS)
    )
    assert rank_namespace("ab", 0, few) == rank_namespace("ab", 0, many)


def test_a_rank_adds_what_it_knows() -> None:
    names = {
        rank_namespace("ab", 0, {"backend": "FLASH_ATTN"}),
        rank_namespace("ab", 1, {"backend": "FLASH_ATTN"}),
        rank_namespace("ab", 0, {"backend": "FLASHINFER"}),
        rank_namespace("cd", 0, {"backend": "FLASH_ATTN"}),
    }
    assert len(names) == 4 and all(len(name) == 32 for name in names)
    described = {"backend": "FLASH_ATTN"}
    assert rank_namespace("ab", 0, described) in names


# ------------------------------------------------------------ what is refused


def refused(folder: Path, change: Callable[[Bag, Bag], object]) -> str:
    with pytest.raises(ValueError, match="^--kv-offloading-config: sec") as error:
        name_after(folder, change)
    return str(error.value)


def test_random_weights(tmp_path: Path) -> None:
    said = refused(
        tmp_path, lambda c, kv: setattr(c.load_config, "load_format", "dummy")
    )
    assert "--load-format dummy" in said and "Load weights" in said


def test_weights_that_are_not_here(tmp_path: Path) -> None:
    name = "nobody/has-this"
    said = refused(tmp_path, lambda c, kv: setattr(c.model_config, "model", name))
    assert f"of model '{name}' are not on this machine" in said
    streamed = "s3://bucket/model"
    said = refused(
        tmp_path, lambda c, kv: setattr(c.model_config, "model_weights", streamed)
    )
    assert "are not on this machine" in said and "--model" in said


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    said = refused(
        tmp_path / "model", lambda c, kv: setattr(c.model_config, "model", empty)
    )
    assert f"{empty} has no weights" in said and "Give a directory" in said


def test_scales_of_the_first_request(tmp_path: Path) -> None:
    said = refused(
        tmp_path, lambda c, kv: setattr(c.cache_config, "calculate_kv_scales", True)
    )
    assert "Set it to false" in said


def test_random_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In releases that draw always, and in those that draw for some algorithms."""
    monkeypatch.delenv("PYTHONHASHSEED")
    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        draw = lambda function: os.urandom(32).hex()
        monkeypatch.setattr(kv_cache_utils, "resolve_none_hash_seed", draw)
        said = refused(tmp_path, lambda c, kv: None)
        assert "PYTHONHASHSEED=0" in said
        assert "--prefix-caching-hash-algo sha256" in said
        monkeypatch.delattr(kv_cache_utils, "resolve_none_hash_seed")
    said = refused(tmp_path, lambda c, kv: None)
    assert said.endswith("Set PYTHONHASHSEED=0 in the environment of all engines.")
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert name_of(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert "PYTHONHASHSEED=0" in refused(tmp_path, lambda c, kv: None)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_hashes_for_which_prompts_can_be_made(algorithm: str, tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        lambda c, kv: setattr(c.cache_config, "prefix_caching_hash_algo", algorithm),
    )
    assert algorithm in said and "Use --prefix-caching-hash-algo sha256" in said


def test_weights_of_another_repository(tmp_path: Path) -> None:
    config, kv = settings(tmp_path)
    with pytest.raises(ValueError, match="another repository .a/whisper.*Remove"):
        namespace(config, kv, "v0.32.0", sources=[("a/whisper", "")])
    own = namespace(config, kv, "v0.32.0", sources=[(config.model_config.model, "")])
    assert own == name_of(tmp_path)


def test_files_that_change_while_the_ranks_load_them(tmp_path: Path) -> None:
    """Also those of a draft model, of a processor, and those that a setting names."""
    config, kv = settings(tmp_path / "model")
    speculate(config, "draft")
    processor = model_in(tmp_path / "processor").model
    config.model_config.multimodal_config = Bag()
    config.model_config.tokenizer = processor
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    config.additional_config = {"scales": str(scales)}
    states = states_before_loading(config)
    assert namespace(config, kv, "v0.32.0", states)
    for path in (
        tmp_path / "model" / "b.safetensors",
        tmp_path / "draft" / "b.safetensors",
        tmp_path / "processor" / "config.json",
        scales,
    ):
        states, before = states_before_loading(config), path.read_bytes()
        path.write_bytes(before + b"1")
        with pytest.raises(ValueError, match=f"{path} was written or replaced while"):
            namespace(config, kv, "v0.32.0", states)


def test_a_model_that_is_not_here_yet_can_be_downloaded_by_the_ranks(
    tmp_path: Path,
) -> None:
    config, _ = settings(tmp_path)
    config.model_config.model = "nobody/has-this"
    assert states_before_loading(config)


def test_an_engine_looks_at_files_before_it_makes_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not keys_are_bytes():
        pytest.skip("this release cannot have a tier below")
    order = []

    class Ranks(Exception):
        pass

    def make_ranks(config: object) -> None:
        order.append("ranks")
        raise Ranks

    monkeypatch.setattr(core, "states_of_files", lambda config: order.append("files"))
    with pytest.raises(Ranks):
        core.EngineCore(MagicMock(), make_ranks, log_stats=False)  # type: ignore[arg-type]
    assert order == ["files", "ranks"]
