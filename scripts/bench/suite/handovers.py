# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode engines gave together: times, counts, answers."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from .client import Answer

GIB = 1 << 30
COUNTS = {
    "host": "vllm:kv_tier_host_hit_tokens_total",
    "hit": "vllm:prefix_cache_hits_total",
    "passed": "vllm:external_prefix_cache_hits_total",
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "seconds": "vllm:nixl_xfer_time_seconds_sum",
}
FAILURES = {
    "failed copies": "vllm:kv_tier_failures_total",
    "failed transfers": "vllm:nixl_num_failed_transfers_total",
    "failed notifications": "vllm:nixl_num_failed_notifications_total",
    "expired leases": "vllm:nixl_num_kv_expired_reqs_total",
}


@dataclass
class Cell:
    """One run of all conversations."""

    config: str
    repeat: int
    answers: list[Answer]
    counts: list[dict[str, float]] = field(default_factory=list)
    """Of each engine: `COUNTS` of this cell, and `FAILURES` since the start."""

    @property
    def requests_per_s(self) -> float:
        first = min(answer.sent for answer in self.answers)
        last = max(answer.times[-1] for answer in self.answers)
        return len(self.answers) / (last - first)

    def ttft_ms(self, first_turn: bool) -> float:
        """Median of the first turns, or of all later ones."""
        some = [a for a in self.answers if a.key.startswith("0-") == first_turn]
        return 1e3 * statistics.median(answer.ttft_s for answer in some)

    def record(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "repeat": self.repeat,
            "requests_per_s": self.requests_per_s,
            "first_ttft_ms": self.ttft_ms(True),
            "later_ttft_ms": self.ttft_ms(False),
            "counts": self.counts,
            "outputs": {answer.key: answer.tokens for answer in self.answers},
        }


def line(cell: Cell) -> str:
    asked = sum(answer.prompt_tokens for answer in cell.answers)
    parts = [
        f"{cell.config:10} {cell.repeat}  {cell.requests_per_s:7.2f} requests/s  "
        f"TTFT ms {cell.ttft_ms(True):7.1f}, later {cell.ttft_ms(False):7.1f}  "
        f"of {asked} tokens"
    ]
    for role, c in zip(("P", "D"), cell.counts):
        parts.append(
            f"{role}: found {c['hit']:.0f}, of these on the host {c['host']:.0f}"
        )
    last = cell.counts[-1]
    if last["bytes"]:
        parts.append(
            f"passed on {last['passed']:.0f}: {last['bytes'] / GIB:.2f} GiB at "
            f"{last['bytes'] / max(last['seconds'], 1e-9) / 1e9:.1f} GB/s"
        )
    return "  ".join(parts)


def differing(mine: list[Cell], right: dict[int, Cell]) -> int:
    """Answers that are not those of the reference."""
    return sum(
        a.tokens != b.tokens
        for cell in mine
        for a, b in zip(cell.answers, right[cell.repeat].answers, strict=True)
    )


def table(cells: list[Cell]) -> str:
    """Medians by configuration, as Markdown."""
    rows = [
        "| | requests/s | TTFT, first turn, ms | later turns, ms |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(cell.config for cell in cells):
        some = [cell for cell in cells if cell.config == name]
        values = (
            [c.requests_per_s for c in some],
            [c.ttft_ms(True) for c in some],
            [c.ttft_ms(False) for c in some],
        )
        texts = (
            f"{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})" for v in values
        )
        rows.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(rows)
