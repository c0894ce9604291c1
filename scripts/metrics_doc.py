# SPDX-License-Identifier: Apache-2.0
"""Write docs/metrics.md from the code: `make docs-metrics`."""

import sys
from pathlib import Path

from vllm.v1.kv_tier.metrics import METRICS, PREFIX, Metric

HEAD = """\
# Metrics and KV events

<!-- Written by scripts/metrics_doc.py (`make docs-metrics`); do not edit. -->

## Metrics

On `/metrics` with the tier on, beside vLLM's own; every one also has the labels
`model_name` and `engine` (the replica). Counts are the scheduler's, so they are those
of all ranks together. Durations are measured on the ranks; the slowest counts. They
come with the output of a later step: on a GPU those of the last steps before a pause
are told when it ends. Counters live through a reset of the prefix cache, and gauges
follow with the next step.

| metric | | |
|---|---|---|
"""

TAIL = """
- Hits of the host are part of `usage.prompt_tokens_details.cached_tokens`: the sum of
  `device_hit_tokens` and `host_hit_tokens` is that of `cached_tokens` over all
  responses. What serves a preempted request when it goes on counts as `resumed_…`, and
  not as `cached_tokens`.
- vLLM's `vllm:prompt_tokens_cached_by_source` has them under `source="host"`, and its
  `vllm:prefix_cache_hits` counts both tiers.
- The periodic log line of vLLM says `Host KV tier hit rate`, of the same requests and
  tokens as its `Prefix cache hit rate`, which is that of both tiers.
- A rising `refused_stores` or `dropped_blocks` says that the device evicts faster than
  blocks can be stored, or that the tier is too small for one step.

`ops/alerts.yml` has alert rules for Prometheus, `ops/grafana.json` a dashboard to
import into Grafana.

## KV events

`--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", …}'` publishes
one stream for both tiers, through vLLM's own publisher.

| event | `medium` | when |
|---|---|---|
| `BlockStored` | `GPU` | a block was computed, or promoted from a host slot |
| `BlockStored` | `CPU` | its store to a host slot was queued |
| `BlockRemoved` | `GPU` | the device evicted it, or its content became invalid |
| `BlockRemoved` | `CPU` | its slot made room, or its store failed |
| `AllBlocksCleared` | | the prefix cache was reset: both tiers are empty |

Each `BlockStored` describes its blocks as vLLM's does: token ids, parent hash, block
size, LoRA, extra keys, KV cache group and its kind; `session_id` is that of the
request that computed them. An event comes when lookups begin to find the block: its
bytes may be on their way. A failed copy takes it back.

The device may hold a block twice, and then stores it twice and removes it twice: count.
`tests/follower.py` is a subscriber that does.

While events are on, the scheduler keeps what an event must say for each block of either
tier: about 220 bytes, and 4 for each of its tokens.
"""


def row(metric: Metric) -> str:
    name = PREFIX + metric.name
    if metric.label:
        values = ", ".join(f"`{value}`" for value in metric.values)
        return (
            f"| `{name}{{{metric.label}}}` | {metric.kind} | {metric.text} {values} |"
        )
    return f"| `{name}` | {metric.kind} | {metric.text} |"


def page() -> str:
    return HEAD + "\n".join(map(row, METRICS)) + "\n" + TAIL


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
