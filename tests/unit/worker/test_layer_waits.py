# SPDX-License-Identifier: Apache-2.0
"""Which layers wait for which part of a step's loads, and where none may."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import CompilationConfig, KVTransferConfig, ParallelConfig
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.worker.layers import (
    LayerWaits,
    make_layer_waits,
    set_layer_waits,
    wait_for_layer_load,
)

CUDAGraphMode = pytest.importorskip(
    "vllm.config.compilation", reason="steps of this release wait for all their loads"
).CUDAGraphMode

NUM_BLOCKS = 4
COMPUTE = "the compute stream"


# ------------------------------------------------------------------------ a step


class Part:
    """In place of the end of one part of the loads."""

    def __init__(self, index: int, waited: list[int]) -> None:
        self._index = index
        self._waited = waited

    def wait(self, stream: object) -> None:
        assert stream == COMPUTE
        self._waited.append(self._index)


class Step:
    """A step of a model whose layers are named by letters, one region each."""

    def __init__(self, layers: str, parts: Sequence[range]) -> None:
        self.waits = LayerWaits({n: i for i, n in enumerate(layers)}, 1)
        self.parts = parts
        self.waited: list[int] = []

    def arm(self) -> None:
        ends: Any = [Part(i, self.waited) for i in range(len(self.parts))]
        self.waits.arm(self.parts, ends)

    def run(self, layers: str) -> list[list[int]]:
        """Which parts are waited for at each of `layers`."""
        found = []
        for layer in layers:
            before = len(self.waited)
            wait_for_layer_load(layer)
            found.append(self.waited[before:])
        return found


@pytest.fixture(autouse=True)
def compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: COMPUTE)
    set_layer_waits(None)


@pytest.fixture
def step() -> Step:
    step = Step("abcde", [range(0, 2), range(2, 3), range(3, 5)])
    step.waits.use = set_layer_waits
    return step


def test_engines_of_a_process_wait_for_their_own_loads(step: Step) -> None:
    other = Step("abcde", [range(0, 5)])
    other.waits.use = set_layer_waits
    other.arm()
    assert other.waits.disarm() is False
    step.arm()
    assert step.run("abcde") == [[0], [], [1], [2], []]
    assert not other.waited


def test_each_layer_waits_for_its_part_once(step: Step) -> None:
    step.arm()
    assert step.run("abcde") == [[0], [], [1], [2], []]
    assert step.waits.disarm()


def test_a_later_part_covers_those_before_it(step: Step) -> None:
    """Layers may come in another order than their regions."""
    step.arm()
    assert step.run("cbade") == [[1], [], [], [2], []]
    assert step.waits.disarm()


def test_a_layer_that_comes_by_twice_waits_once(step: Step) -> None:
    """Such as one that writes its keys and values before it attends."""
    step.arm()
    assert step.run("aaeeb") == [[0], [], [2], [], []]
    assert not step.waits.disarm()


@pytest.mark.parametrize("layers", ["", "abcd", "acde"])
def test_a_layer_that_did_not_come_by_is_missed(step: Step, layers: str) -> None:
    step.arm()
    step.run(layers)
    assert not step.waits.disarm()


def test_layers_without_regions_do_not_wait(step: Step) -> None:
    step.arm()
    assert step.run("xa") == [[], [0]]


def test_nobody_waits_in_a_step_that_is_not_armed(step: Step) -> None:
    assert step.run("abcde") == 5 * [[]]
    step.arm()
    step.run("abcde")
    assert step.waits.disarm()
    assert step.run("abcde") == 5 * [[]]


def test_every_step_has_its_own_parts(step: Step) -> None:
    step.arm()
    step.run("ab")
    assert not step.waits.disarm()
    step.parts = [range(0, 5)]
    step.arm()
    assert step.run("abcde") == [[0], [], [], [], []]
    assert step.waits.disarm()


def test_without_a_tier_layers_do_not_wait(step: Step) -> None:
    step.arm()
    set_layer_waits(None)
    assert step.run("a") == [[]]


# ----------------------------------------------------------------------- a model


def config(layers: dict[str, Any], **other: Any) -> Any:
    mode = other.pop("cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    compilation = CompilationConfig(cudagraph_mode=mode)
    compilation.static_forward_context.update(layers)
    settings = {
        "compilation_config": compilation,
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config": ParallelConfig(),
    }
    return SimpleNamespace(**settings | other)


def attention(kv_cache: Any) -> Any:
    return SimpleNamespace(kv_cache=kv_cache, impl="a backend")


def test_a_layer_waits_for_the_last_of_its_regions() -> None:
    # Keys and values of a in halves, b in one; c shares the cache of b.
    a, b = torch.zeros(2, NUM_BLOCKS, 8), torch.zeros(NUM_BLOCKS, 24)
    regions = build_regions([a, b], NUM_BLOCKS)
    assert len(regions) == 3
    layers = {"a": attention(a), "b": attention([b]), "c": attention(b)}
    layers["mlp"] = SimpleNamespace()
    layers["empty"] = attention(torch.empty(0))
    waits = make_layer_waits(config(layers), regions)
    assert waits is not None
    assert waits.regions == {"a": 1, "b": 2, "c": 2}
    # One CUDA graph may hold what decodes.
    assert waits.max_decode_tokens == 1


def test_layers_inside_one_another_wait_for_what_they_share() -> None:
    whole = torch.zeros(NUM_BLOCKS, 2, 8)
    regions = build_regions([whole[:, 0], whole[:, 1]], NUM_BLOCKS)
    layers = {"a": attention(whole[:, 0]), "b": attention(whole[:, 1])}
    waits = make_layer_waits(config(layers), regions)
    assert waits is not None
    assert len(regions) == 1 and waits.regions == {"a": 0, "b": 0}


def test_a_layer_that_is_no_attention_layer_keeps_the_step_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba layers get their state elsewhere, where no wait is."""
    a, state = torch.zeros(NUM_BLOCKS, 8), torch.zeros(NUM_BLOCKS, 8)
    layers = {"a": attention(a), "m": SimpleNamespace(kv_cache=[state])}
    caplog.set_level("INFO")
    regions = build_regions([a, state], NUM_BLOCKS)
    assert make_layer_waits(config(layers), regions) is None
    assert "SimpleNamespace is not an attention layer" in caplog.text


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "CUDA graph"),
        ({"cudagraph_mode": None}, "CUDA graph"),
        ({"speculative_config": "any"}, "speculative decoding"),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="NixlConnector", kv_role="kv_both"
                )
            },
            "KV connector",
        ),
        ({"parallel_config": ParallelConfig(enable_dbo=True)}, "micro-batches"),
        pytest.param(
            {"parallel_config": ParallelConfig(ubatch_size=2)},
            "micro-batches",
            marks=pytest.mark.skipif(
                not hasattr(ParallelConfig, "use_ubatching"),
                reason="this release has micro-batches with enable_dbo only",
            ),
        ),
    ],
)
def test_where_steps_wait_for_all_their_loads(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    a = torch.zeros(NUM_BLOCKS, 8)
    caplog.set_level("INFO")
    regions = build_regions([a], NUM_BLOCKS)
    assert make_layer_waits(config({"a": attention(a)}, **settings), regions) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    "mode",
    [
        CUDAGraphMode.NONE,
        CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_DECODE_ONLY,
        CUDAGraphMode.FULL_AND_PIECEWISE,
    ],
)
def test_modes_in_which_prefill_comes_by_every_layer(mode: Any) -> None:
    a = torch.zeros(NUM_BLOCKS, 8)
    layers = config({"a": attention(a)}, cudagraph_mode=mode)
    assert make_layer_waits(layers, build_regions([a], NUM_BLOCKS)) is not None
