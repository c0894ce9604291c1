# SPDX-License-Identifier: Apache-2.0
"""Three steps of a prompt that ends with a hash, scheduled ahead. No tier, no engine.

    python -m tests.sim.overwritten

Prints, as JSON, how many tokens the state of the request covers after the second step,
and how many the key of its block says. A key of fewer is the bug that a prerequisite
of v0.30.0 and v0.31.0 mends. Runs on upstream's tree as well as on the patched one.
"""

import json
from copy import copy

import scheduler_setup

from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.structured_output import StructuredOutputManager

from ..names import sha256
from . import upstream
from .layouts import ALL

NUM_BLOCKS = 16


def main() -> None:
    layout = next(each for each in ALL if each.name == "full+mamba, partial hits")
    size = layout.hash_block_size
    prompt = list(range(2 * layout.block_size + size))
    config = copy(scheduler_setup.make_scheduler(NUM_BLOCKS, 2, 64, 256).vllm_config)
    config.cache_config.block_size = layout.block_size
    config.cache_config.mamba_cache_mode = layout.mamba_cache_mode
    config.scheduler_config.async_scheduling = True
    upstream.register_specs(config)
    scheduler = upstream.make_scheduler(
        True,
        layout.block_size,
        size,
        None,
        vllm_config=config,
        kv_cache_config=upstream.kv_cache_config(
            None,
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=layout.kv_cache_groups(),
        ),
        structured_output_manager=StructuredOutputManager(config),
    )
    request = scheduler_setup.make_request("ends with a hash", prompt, max_tokens=8)
    # Its hashes were of other blocks.
    request.block_hashes = []
    request._block_hasher = get_request_block_hasher(size, sha256)
    request.block_hashes = request._block_hasher(request)
    scheduler.add_request(request)
    for _ in range(3):
        scheduler.schedule()
    states = scheduler.kv_cache_manager.coordinator.single_type_managers[-1]
    block = states.req_to_blocks[request.request_id][-1]
    known = block.block_hash_num_tokens if block.block_hash is not None else None
    print(json.dumps({"state": request.num_computed_tokens, "key": known}))


if __name__ == "__main__":
    main()
