# SPDX-License-Identifier: Apache-2.0
"""What hybrid models take of the host and of the link, beyond what their hits need.

    make bench-hybrid

Conversations of 16 turns that grow to 32k tokens take turns on one engine: upstream's
planning of a release makes groups of the layers of each shape (`sizing.shapes`), its
scheduler runs the requests, and the tier plans the copies. Only the copies themselves
and the forward pass are left out. Between turns others take the whole device. Each
shape has five figures:

- link: bytes of all loads and stores, to the bytes that the groups of their blocks
  need; and the same if all blocks were copied whole.
- asked: keys that secondary tiers are asked for, for such a prompt that neither device
  nor host has any of, to those of all its blocks.
- tier: what a secondary tier is written for the turns of a conversation, and what
  another engine reads of it for the last turn, to the same blocks as whole slots.
- costs: blocks that such a hit loads, to those that the tier expects at start.
- host: for hosts of several sizes, in slots that the next turns of all conversations
  can use, the tokens of prompts from the cache, in % of those with an unlimited host;
  of linear conversations, and where a part of the turns branches off at an earlier one.
"""

import argparse
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instant_tier import InstantTier, Moved
from scheduler_setup import sampled

from sizing.shapes import SHAPES, Planned, Shape, plan
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.scheduler.kv_groups import (
    group_blocks,
    prefix_ends,
    reachable_blocks,
    tokens_per_block,
)
from vllm.v1.kv_tier.scheduler.secondary.lookup import PromptLookup
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

try:
    from vllm.utils.hashing import sha256
except ImportError:
    from vllm.utils import sha256  # type: ignore[attr-defined, no-redef]

kv_cache_utils.init_none_hash(sha256)
TOKENS, TURNS = 32_768, 16
CHECKED = "Gemma-3-27B Gemma-4-31B gpt-oss-120b Qwen3-Next-80B DeepSeek-V4-Flash"
UNLIMITED = 0.0


@dataclass
class Served:
    """What came of a run."""

    hit_tokens: int = 0
    prompt_tokens: int = 0
    last_loads: int = 0
    """Blocks that the last turn of each conversation loaded."""
    last_tokens: int = 0
    """Tokens that they hit."""
    slots: int = 0
    """Slots filled at the end."""
    link_bytes: int = 0
    """Bytes of these loads, as far as groups need them where plans say the group."""
    whole_bytes: int = 0
    """The same, if all blocks were copied whole."""
    needed_bytes: int = 0
    stored_blocks: int = 0


class Engine:
    """One engine without ranks, and what its tier plans."""

    def __init__(
        self,
        planned: Planned,
        num_slots: int,
        policy: str,
        tier: InstantTier | None = None,
    ) -> None:
        self.planned = planned
        self._tier = tier
        config = dataclasses.replace(planned.kv_cache_config)
        vllm_config = planned.vllm_config
        groups = group_blocks(vllm_config, config)
        config.kv_tier = KVTierLayout(
            KVTierConfig(
                num_slots * planned.slot_bytes,
                eviction_policy=policy,
                debug=DebugConfig("write_back", 1, max_load_stall_ms=None),
            ),
            num_slots,
            planned.slot_bytes,
            load_s=planned.slot_bytes / 50e9,
            tokens_per_block=tokens_per_block(groups),
            secondary=None
            if tier is None
            else tier.layout([group.block_size for group in groups], num_slots),
            prefix_ends=prefix_ends(groups),
            reachable=reachable_blocks(groups, False),
            group_bytes=tuple(planned.group_bytes()),
        )
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=planned.block_size,
            hash_block_size=planned.hash_size,
        )
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.hasher = kv_cache_utils.get_request_block_hasher(planned.hash_size, sha256)
        self.served = Served()
        self._needs = planned.group_bytes()
        self._num_requests = 0

    def serve(self, prompt: list[int]) -> int:
        """Run a prompt; returns how many blocks it loads."""
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        num_loads = 0
        while self.scheduler.requests:
            output = self.scheduler.schedule()
            for new in output.scheduled_new_reqs:
                self.served.hit_tokens += new.num_computed_tokens
            num_loads += self._take_plan(output.kv_tier_plan)
            ran = sampled(output)
            if request.num_computed_tokens < request.num_tokens:
                ran.sampled_token_ids = [[] for _ in ran.req_ids]
            self.scheduler.update_from_output(output, ran)
        self.served.prompt_tokens += len(prompt)
        self._take_device()
        return num_loads

    def write_rest(self) -> None:
        """Write what the secondary tier lacks, as at the end of an engine."""
        assert self._tier is not None
        # Until no load can fail that would void what was stored.
        for _ in range(SchedulingTuning().settled_steps + 1):
            self.pool.begin_step()
            self._take_plan(self.pool.take_plan(is_idle=True))
        for _, jobs in self.pool.secondary.last_jobs():
            self._tier.run(jobs, self.pool)

    def _take_device(self) -> None:
        """Requests that keep nothing take the whole device, before the next turn."""
        pool = self.pool
        pool.begin_step()
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        pool.free_blocks(blocks)
        self._take_plan(pool.take_plan())

    def _take_plan(self, plan: Any) -> int:
        served = self.served
        needs, size = self._needs, self.planned.slot_bytes
        for slots in (slots for slots, _ in plan.pairs()):
            for index in slots:
                group = get_group_id(self.pool.host.at(index).keys[0])
                served.needed_bytes += needs[group]
                served.link_bytes += needs[plan.groups[index]] if plan.groups else size
                served.whole_bytes += size
        served.stored_blocks += len(plan.store_slots) + len(plan.clean_slots)
        if self._tier is not None:
            self._tier.run(plan.secondary, self.pool)
        return len(plan.load_slots) + len(plan.ahead_slots)


def asked(planned: Planned, num_tokens: int = TOKENS) -> tuple[list[int], list[int]]:
    """For each group, how many keys secondary tiers are asked for, for a prompt that is
    nowhere else; and the number of its blocks."""
    groups = group_blocks(planned.vllm_config, planned.kv_cache_config)
    sizes = [group.block_size for group in groups]
    nothing: Any = SimpleNamespace(has=lambda key: False)
    hashes = [i.to_bytes(32, "big") for i in range(num_tokens // planned.hash_size)]
    request: Any = SimpleNamespace(block_hashes=hashes)
    found = []
    for reachable in (reachable_blocks(groups, False), ()):
        lookup = PromptLookup(
            sizes, planned.hash_size, nothing, lambda key: None, reachable
        )
        _, _, missing = lookup.find_missing(request, 0, 1 << 30, None)
        counts = Counter(get_group_id(key) for key, _ in missing)
        found.append([counts[i] for i in range(len(sizes))])
    return found[0], found[1]


def below(planned: Planned, num_tokens: int = TOKENS) -> tuple[Moved, Moved, float]:
    """What a tier moves for a conversation, then for its last turn on another engine;
    and the tokens that this one hits."""
    groups = group_blocks(planned.vllm_config, planned.kv_cache_config)
    many = 2 * TURNS * sum(g.num_blocks for g in groups)
    tier = InstantTier(planned.slot_bytes, planned.group_bytes())
    first = Engine(planned, many, "lru", tier)
    turns = [prompt for _, prompt in prompts(1, 0.0, 1, num_tokens)]
    for prompt in turns:
        first.serve(prompt)
    first.write_rest()
    written, tier.moved = tier.moved, Moved()
    second = Engine(planned, many, "lru", tier)
    second.serve(turns[-1])
    return written, tier.moved, second.served.hit_tokens / len(turns[-1])


def prompts(
    num_conversations: int, branches: float, seed: int, num_tokens: int
) -> list[tuple[int, list[int]]]:
    """(turn, prompt) of each turn of conversations that take turns.

    `branches`: part of the turns that go on from an earlier one than the last.
    """
    draw = random.Random(seed)
    grows = num_tokens // TURNS
    history: list[list[list[int]]] = [[[]] for _ in range(num_conversations)]
    found = []
    for turn in range(TURNS):
        # Who answers fast in one turn may be slow in the next.
        draw.shuffle(history)
        for said in history:
            if len(said) > 2 and draw.random() < branches:
                del said[draw.randrange(1, len(said) - 1) + 1 :]
            # No whole number of blocks, as prompts are.
            num_added = grows - draw.randrange(grows // 32)
            added = [draw.randrange(1000, 120_000) for _ in range(num_added)]
            said.append(said[-1] + added)
            found.append((turn, said[-1]))
    return found


def run(
    planned: Planned,
    num_slots: int,
    turns: Sequence[tuple[int, list[int]]],
    policy: str,
) -> Served:
    """Serve `turns` in order, with a host of `num_slots`."""
    engine = Engine(planned, num_slots, policy)
    for turn, prompt in turns:
        served = engine.served
        before = served.hit_tokens
        num_loads = engine.serve(prompt)
        if turn == TURNS - 1:
            served.last_loads += num_loads
            served.last_tokens += served.hit_tokens - before
    engine.served.slots = len(engine.pool.host)
    return engine.served


def measure(
    shape: Shape,
    conversations: int,
    sizes: Sequence[float],
    branches: Sequence[float],
    policy: str,
    num_tokens: int = TOKENS,
) -> dict[str, Any]:
    """The figures of one shape, for prompts that grow to `num_tokens`."""
    planned = plan(shape, num_tokens + 64)
    groups = group_blocks(planned.vllm_config, planned.kv_cache_config)
    # Every block of every turn fits.
    many = conversations * TURNS * sum(g.num_blocks for g in groups)
    linear = prompts(conversations, 0.0, 1, num_tokens)
    free = run(planned, many, linear, policy)
    useful = free.last_loads / conversations
    keys, blocks = map(sum, asked(planned, num_tokens))
    written, read, hit = below(planned, num_tokens)
    result: dict[str, Any] = {
        "shape": shape.name,
        "slot_bytes": planned.slot_bytes,
        "useful_slots": useful,
        "kept": free.slots / conversations / useful,
        "link": free.link_bytes / free.needed_bytes,
        "link_whole": free.whole_bytes / free.needed_bytes,
        "cost": free.last_tokens / free.last_loads / tokens_per_block(groups),
        "asked": keys,
        "blocks": blocks,
        "tier": {
            "stored": written.stored_bytes / (written.blocks * planned.slot_bytes),
            "loaded": read.loaded_bytes / max(read.blocks * planned.slot_bytes, 1),
            "hit": hit,
        },
        "hits": {},
    }
    for part in branches:
        turns = prompts(conversations, part, 1, num_tokens)
        best = free if not part else run(planned, many, turns, policy)
        found = {}
        for size in sizes:
            slots = round(size * useful * conversations)
            served = run(planned, slots, turns, policy)
            found[size] = served.hit_tokens / best.hit_tokens
        found[UNLIMITED] = best.hit_tokens / best.prompt_tokens
        result["hits"][part] = found
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", nargs="+", default=CHECKED.split(), metavar="NAME")
    add("--conversations", type=int, default=8)
    add("--sizes", type=float, nargs="+", default=[1.0, 1.15, 1.3, 1.6, 2.0, 3.0])
    add("--branches", type=float, nargs="*", default=[0.0, 0.2])
    add("--eviction-policy", default="proven")
    add("--out", type=Path, default=Path("build/hybrid.json"))
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name in args.shape]
    found = []
    for shape in shapes:
        begun = time.monotonic()
        one = measure(
            shape, args.conversations, args.sizes, args.branches, args.eviction_policy
        )
        found.append(one)
        print(
            f"{one['shape']}: kept {one['kept']:.2f} of what the next turn can use, "
            f"link {one['link']:.3f} of what is needed (whole blocks: "
            f"{one['link_whole']:.3f}), cost {one['cost']:.3f} of the "
            f"expected, {one['asked']} keys asked for of {one['blocks']}, "
            f"stored {one['tier']['stored']:.3f} and loaded "
            f"{one['tier']['loaded']:.3f} of whole objects "
            f"({time.monotonic() - begun:.0f} s)"
        )
        for part, hits in one["hits"].items():
            cells = [f"{size:g}: {100 * hit:.1f}" for size, hit in hits.items() if size]
            rest = 100 * hits[UNLIMITED]
            print(
                f"  {part:.0%} branches ({rest:.1f}% of the tokens): {', '.join(cells)}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
