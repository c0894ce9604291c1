# SPDX-License-Identifier: Apache-2.0
"""The page of `make demo`: from its `report.json` and, if there, its `spans.jsonl`."""

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.suite import style
from bench.suite.style import COMPUTED, DEVICE, HOST, STORE, WITH, WITHOUT

from .html import Card, Section, render, svg

MiB = 1 << 20

# Lanes of the timeline, top down.
LANES = {
    "load": ("loads", HOST),
    "forward": ("forward pass", DEVICE),
    "store": ("stores", STORE),
}
LANE_OF = {"ahead": "load"}
VERBS = {"load": "loaded", "ahead": "loaded ahead", "store": "stored"}


def demo_page(folder: Path) -> str:
    """The page of the run in `folder`.

    Raises:
        OSError: It has no report.

    """
    report = json.loads((folder / "report.json").read_text())
    requests = report["requests"]
    sections = [
        Section(
            "Where the prompt tokens came from",
            "Each bar is a request with the tier on, in the order they were asked.",
            svg(_hits(requests)),
        ),
        Section(
            "Time to first token",
            "The same requests, with the tier off and on.",
            svg(_ttft(requests)),
        ),
        Section(
            "Bytes moved",
            "Between device and host, summed from the first request on.",
            svg(_bytes(requests)),
        ),
        _timeline(folder / "spans.jsonl"),
        _restart(report.get("restart")),
        Section("Each turn", html=_turns(report["turns"])),
    ]
    return render(
        "KV tier demo",
        f"{report['conversation_tokens']:,} tokens in "
        f"{len({r['conversation'] for r in requests})} conversations. Room for "
        f"{report['device_cache_tokens']:,} on the device and "
        f"{report['host_tier_tokens']:,} in host memory. "
        f"vLLM {report['version']}, on a CPU.",
        _cards(report),
        sections,
    )


def _cards(report: dict[str, Any]) -> list[Card]:
    requests = report["requests"]
    prompt = sum(r["prompt_tokens"] for r in requests)
    host = sum(r["host_hit_tokens"] for r in requests)
    device = sum(r["device_hit_tokens"] for r in requests)
    off, on = report["median_ttft_ms_off"], report["median_ttft_ms_on"]
    equal = report["identical_outputs"]
    failures = report["failures"]
    return [
        Card("yes" if equal else "no", "answers are equal", not equal),
        Card(f"{off:.0f} → {on:.0f} ms", "median TTFT, off → on", on >= off),
        Card(f"{host / prompt:.0%}", "of prompt tokens from the host"),
        Card(f"{device / prompt:.0%}", "of prompt tokens from the device"),
        Card(str(len(failures)), "checks failed", bool(failures)),
    ]


def _figure(height: float = 3.4) -> tuple[Figure, Axes]:
    figure = style.figure(10, height)
    axes = figure.subplots()
    style.tidy(axes)
    return figure, axes


def _along_requests(axes: Axes, requests: list[dict[str, Any]]) -> None:
    """Names the turns below requests that stand side by side."""
    firsts: dict[int, int] = {}
    for i, request in enumerate(requests):
        firsts.setdefault(request["turn"], i)
    for first in list(firsts.values())[1:]:
        axes.axvline(first - 0.5, color="#c3cad2", linewidth=0.8)
    axes.set_xticks(list(firsts.values()), [f"turn {turn}" for turn in firsts])
    axes.set_xlim(-0.6, len(requests) - 0.4)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))


def _hits(requests: list[dict[str, Any]]) -> Figure:
    figure, axes = _figure()
    at = range(len(requests))
    device = [100 * r["device_hit_tokens"] / r["prompt_tokens"] for r in requests]
    host = [100 * r["host_hit_tokens"] / r["prompt_tokens"] for r in requests]
    cached = [d + h for d, h in zip(device, host)]
    axes.bar(at, device, 0.8, color=DEVICE, label="device")
    axes.bar(at, host, 0.8, device, color=HOST, label="host")
    rest = [100 - c for c in cached]
    axes.bar(at, rest, 0.8, cached, color=COMPUTED, label="computed")
    axes.set_ylabel("% of the prompt")
    _along_requests(axes, requests)
    _legend(axes, 3)
    return figure


def _ttft(requests: list[dict[str, Any]]) -> Figure:
    figure, axes = _figure()
    at = range(len(requests))
    for key, color, label in (("off", WITHOUT, "tier off"), ("on", WITH, "tier on")):
        times = [r[f"ttft_ms_{key}"] for r in requests]
        axes.plot(at, times, "o-", color=color, label=label, markersize=4, lw=1.2)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    _along_requests(axes, requests)
    _legend(axes, 2)
    return figure


def _bytes(requests: list[dict[str, Any]]) -> Figure:
    figure, axes = _figure()
    at = range(len(requests))
    for key, color in (("stored", STORE), ("loaded", HOST)):
        sums = accumulate(r.get(f"{key}_bytes", 0) / MiB for r in requests)
        axes.step(at, list(sums), where="post", color=color, label=key, lw=2)
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    _along_requests(axes, requests)
    _legend(axes, 2)
    return figure


def _timeline(path: Path) -> Section:
    title = "One step"
    spans = (
        [json.loads(s) for s in path.read_text().splitlines()]
        if (path.is_file())
        else []
    )
    step = busiest(spans)
    if not step:
        return Section(title, "No copies were recorded in this run.")
    start = min(span["start"] for span in step)
    figure, axes = _figure(2.2)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=style.GRID)
    for lane, (name, (_, color)) in enumerate(LANES.items()):
        bars = [
            (1e3 * (s["start"] - start), 1e3 * (s["end"] - s["start"]))
            for s in step
            if LANE_OF.get(s["what"], s["what"]) == name
        ]
        axes.broken_barh(bars, (len(LANES) - lane - 0.4, 0.8), color=color)
    names = [label for label, _ in LANES.values()]
    axes.set_yticks(range(len(LANES), 0, -1), names)
    axes.set_ylim(0.4, len(LANES) + 0.6)
    axes.set_xlabel("ms from the begin of the step")
    axes.set_xlim(left=0)
    text = ", ".join(
        f"{sum(s['blocks'] for s in step if s['what'] == what)} blocks {verb} "
        f"({sum(s['bytes'] for s in step if s['what'] == what) / MiB:.1f} MiB)"
        for what, verb in VERBS.items()
        if any(s["what"] == what for s in step)
    )
    return Section(
        title,
        f"The one with most copies, step {step[0]['seq']}: {text}. On a CPU copies are "
        "part of the step; on a GPU they run beside it.",
        svg(figure),
    )


def busiest(spans: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of the step that moved most, one that loads and stores if any does."""
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        steps[span["seq"]].append(span)

    def key(step: list[dict[str, Any]]) -> tuple[int, int]:
        kinds = {LANE_OF.get(s["what"], s["what"]) for s in step}
        return len(kinds & LANES.keys()), sum(s["bytes"] for s in step)

    moved = [s for s in steps.values() if any(span["bytes"] for span in s)]
    return max(moved, key=key, default=[])


def _restart(restart: dict[str, Any] | None) -> Section:
    title = "After SIGKILL and a new start"
    if restart is None:
        return Section(title, "This release has no tier below the host.")
    head = ["", "prompt tokens", "cached tokens", "from files", "TTFT"]
    prompt = f"{restart['prompt_tokens']:,}"
    served = f"{restart['cached_tokens']:,}", f"{restart['loaded_tokens']:,}"
    rows = [
        ["from files", prompt, *served, f"{restart['ttft_ms_from_files']:.0f} ms"],
        ["computed", prompt, "0", "0", f"{restart['ttft_ms_computed']:.0f} ms"],
    ]
    return Section(
        title,
        "The first turn that the new server was asked, and the same turn for somebody "
        "who shares nothing.",
        html=_table(head, rows),
    )


def _turns(turns: list[dict[str, Any]]) -> str:
    head = ["turn", "prompt tokens", "device hits", "host hits", "TTFT off", "TTFT on"]
    rows = [
        [
            str(t["turn"]),
            f"{t['prompt_tokens']:,}",
            f"{t['device_hit_tokens']:,}",
            f"{t['host_hit_tokens']:,}",
            f"{t['ttft_ms_off']:.0f} ms",
            f"{t['ttft_ms_on']:.0f} ms",
        ]
        for t in turns
    ]
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table>{row(head, 'th')}{body}</table>"
