# SPDX-License-Identifier: Apache-2.0
"""What the tier must reach: ratios against the best connector, and against `none`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .model import SHAPES
from .scales import SCALES
from .table import Results


@dataclass(frozen=True)
class Bar:
    """One limit and what was measured.

    Attributes:
        value: None if something that it needs was not measured.
        note: what was compared.

    """

    name: str
    config: str
    value: float | None
    limit: float
    at_least: bool
    note: str

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "pass" if met else "MISS"

    def row(self) -> list[str]:
        """Cells of a table."""
        sign = "≥" if self.at_least else "≤"
        value = "" if self.value is None else f"{self.value:.3f}"
        limit = f"{sign} {self.limit:g}"
        return [self.name, self.config, value, limit, self.verdict, self.note]


LATENCY_LIMITS = {1024: 0.65, 4096: 0.6, 16384: 0.7}
AGENTS = ("agent", "agent_tools")
AGAINST_BEST = (
    # workload, metric, more is better, limit of ours / theirs
    *((name, "output_tokens_per_s", True, 1.25) for name in AGENTS),
    *((name, "later_ttft_ms.mean", False, 0.65) for name in AGENTS),
    ("multiturn", "output_tokens_per_s", True, 1.0),
    ("multiturn", "later_ttft_ms.mean", False, 0.85),
    ("overfull", "makespan_s", False, 0.88),
    ("overfull", "later_ttft_ms.mean", False, 0.7),
    ("overfull", "decode_ms.mean", False, 1.03),
    ("interfere", "itl_ms.host.p99", False, 1.15),
)
AGAINST_LARGE = (
    # workload, metric, limit of ours / an engine whose device holds everything
    ("rotate", "makespan_s", 1.1),
    ("rotate", "later_ttft_ms.mean", 1.4),
)


def bars(results: Results, h2d_gb_s: float | None, reference: str) -> Iterator[Bar]:
    """All bars for every configuration of the tier.

    Args:
        reference: configuration whose outputs are right.
        results: of all configurations, medians are compared.
        h2d_gb_s: measured rate of plain pinned copies to the device, 1e9 bytes/s.

    """
    for config in results.of_family("core"):
        for length, limit in LATENCY_LIMITS.items():
            metric = f"ttft_ms.host.{length}"
            yield _against_best(results, config, "latency", metric, False, limit)
            yield _against_wire(results, config, length, h2d_gb_s)
        for workload, metric, higher, limit in AGAINST_BEST:
            yield _against_best(results, config, workload, metric, higher, limit)
        for workload, metric, limit in AGAINST_LARGE:
            yield _against_large(results, config, workload, metric, limit)
        for workload in ("no_reuse", "fits"):
            none = results.median(workload, "makespan_s", "none")
            ours = results.median(workload, "makespan_s", config)
            yield Bar(
                f"{workload}: throughput / none",
                config,
                none / ours if none and ours else None,
                0.995,
                True,
                f"makespan {_n(ours)} s, none {_n(none)} s",
            )
        gap = results.median("interfere", "itl_ms.host.max", config)
        prefill = results.median("interfere", "unseen_ttft_ms.p50", "none")
        yield Bar(
            "interfere: longest gap / prefill it replaces",
            config,
            gap / prefill if gap and prefill else None,
            1.0,
            False,
            f"{_n(gap)} ms, prefill of none {_n(prefill)} ms",
        )
        yield from _outputs(results, config, reference)


def _against_best(
    results: Results,
    config: str,
    workload: str,
    metric: str,
    higher: bool,
    limit: float,
) -> Bar:
    ours = results.median(workload, metric, config)
    best = results.best_connector(workload, metric, higher)
    value = ours / best[1] if ours is not None and best else None
    note = f"{_n(ours)}, best {best[0]} {_n(best[1])}" if best else "no connector ran"
    return Bar(f"{workload}: {metric}", config, value, limit, higher, note)


def _against_large(
    results: Results, config: str, workload: str, metric: str, limit: float
) -> Bar:
    ours = results.median(workload, metric, config)
    large = results.median(workload, metric, "large")
    value = ours / large if ours is not None and large else None
    note = f"{_n(ours)}, large {_n(large)}"
    return Bar(f"{workload}: {metric} / large", config, value, limit, False, note)


def _against_wire(
    results: Results, config: str, length: int, h2d_gb_s: float | None
) -> Bar:
    ours = results.median("latency", f"ttft_ms.host.{length}", config)
    # The step of the tail: the same prefix and a tail as long, found on the device.
    step = results.median("latency", f"ttft_ms.device.{length}", "none")
    value, note = None, "give --h2d-gb-s" if h2d_gb_s is None else "no latency of none"
    if h2d_gb_s is not None and step is not None and ours is not None:
        scale = SCALES[results.cells[0]["scale"]]
        itemsize = 2 if scale.dtype == "bfloat16" else 4
        size = length * SHAPES[scale.shape].kv_bytes_per_token(itemsize)
        wire = size / h2d_gb_s / 1e6
        value = ours / (wire + step)
        note = f"{_n(ours)} ms, wire {_n(wire)} ms, step of the tail {_n(step)} ms"
    name = f"latency: ttft_ms.host.{length} / (wire + step)"
    return Bar(name, config, value, 1.3, False, note)


def _outputs(results: Results, config: str, reference: str) -> Iterator[Bar]:
    ours, _ = results.outputs(config, reference)
    yield Bar(
        "outputs: differ, and not by a near tie",
        config,
        float(ours.wrong) if ours.runs else None,
        0,
        False,
        f"{ours.requests} requests of {ours.runs} runs, {ours.unknown} more differ "
        "where no logprobs tell why",
    )
    jitter, _ = results.outputs("none-jitter", reference)
    rates = [1e4 * c.near_ties / max(c.tokens, 1) for c in (ours, jitter)]
    if ours.runs and jitter.runs:
        value = rates[0] / rates[1] if rates[1] else float(ours.near_ties > 0)
    else:
        value = None
    yield Bar(
        "outputs: near ties / those of none-jitter",
        config,
        value,
        1.0,
        False,
        f"{rates[0]:.3g} and {rates[1]:.3g} in 10,000 tokens",
    )


def _n(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
