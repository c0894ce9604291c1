# SPDX-License-Identifier: Apache-2.0
"""A data parallel engine has the tier that it would have alone.

Whatever else is on: so what is shown of an engine alone is shown of each of several.
They meet in the memory of their machine at start, and in what lies below the host.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.features import FEATURES, Feature
from vllm.v1.kv_tier.config import KVTierConfig, check_memory_of_engines
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.stores.identity import namespace

from ..e2e.release import known
from ..settings import options
from ..sim import upstream
from .stores.test_identity import one_seed as one_seed
from .stores.test_identity import settings as other_settings
from .test_config import LLAMA, engine_config
from .test_config import _v1 as _v1

# Refused with or without it; a pool is what its engines share (`e2e/test_pool.py`).
APART = {"DP", "PC", "RE", "OP"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 1}))
    (folder / "model.safetensors").write_bytes(b"some weights")
    draft = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(LLAMA | draft))
    (folder / "draft" / "model.safetensors").write_bytes(b"some weights")
    return folder


@pytest.mark.skipif(not keys_are_bytes(), reason="has no secondary tiers")
@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(f, id=f.code, marks=pytest.mark.pairs(f.code, "DP"))
        for f in FEATURES
        if f.code not in APART
    ],
)
def test_a_data_parallel_engine_has_the_tier_of_one_alone(
    feature: Feature, model: Path, tmp_path: Path
) -> None:
    llm: dict[str, Any] = dict(feature.llm)
    if feature.code == "EA":
        llm["speculative_config"] = {
            **llm["speculative_config"],
            "model": f"{model}/draft",
        }
    if feature.code == "PE" and not upstream.RESETS_RUNNING_REQUESTS:
        pytest.skip("so old that prompt embeddings turn the prefix cache off")
    _, kv = other_settings(tmp_path / "other")
    found = []
    for parallel in ({}, {"data_parallel_size": 2}):
        config = engine_config(
            str(model),
            kv_offloading_config=options(**feature.tier),
            **known(llm | parallel),
        )
        check_memory_of_engines(config, 2)
        tier = KVTierConfig.from_vllm_config(config)
        assert tier is not None
        found.append((tier, namespace(config, kv, "v0.32.0")))
    assert found[0] == found[1]
