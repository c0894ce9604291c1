# SPDX-License-Identifier: Apache-2.0
"""A request preempted in the step that scheduled it. No tier, no engine.

    python -m tests.sim.uncomputed

Prints, as JSON, how many tokens of its prompt were computed, and how many a twin
finds in the prefix cache. More found than computed is the bug of patch 0010. Runs on
upstream's tree as well as on the patched one.
"""

import json

from scheduler_setup import (
    BLOCK_SIZE,
    make_request,
    make_scheduler,
    timed_step,
)

CHUNK = 2 * BLOCK_SIZE
"""Tokens of a prompt for each step."""


def main() -> None:
    prompt = list(range(7 * BLOCK_SIZE))
    scheduler = make_scheduler(
        # The null block, the one prompt, and the other.
        num_blocks=1 + len(prompt) // BLOCK_SIZE + 1,
        max_num_seqs=2,
        max_num_batched_tokens=CHUNK + BLOCK_SIZE,
        max_model_len=256,
        policy="priority",
    )
    scheduler.scheduler_config.long_prefill_token_threshold = CHUNK
    unimportant = make_request("unimportant", prompt, max_tokens=8)
    unimportant.priority = 1
    scheduler.add_request(unimportant)
    timed_step(scheduler)
    important = make_request("important", [999] * BLOCK_SIZE, max_tokens=8)
    scheduler.add_request(important)
    timed_step(scheduler)
    num_computed = unimportant.num_computed_tokens
    # Its next two blocks are the last free ones. Then the other needs one. Releases
    # differ in how far the first step went.
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - CHUNK // BLOCK_SIZE)
    timed_step(scheduler)
    assert unimportant.status.name == "PREEMPTED"
    twin = make_request("twin", [*prompt, 1], max_tokens=1)
    found = scheduler.kv_cache_manager.get_computed_blocks(twin)
    print(json.dumps({"computed": num_computed, "found": found[1]}))


if __name__ == "__main__":
    main()
