# SPDX-License-Identifier: Apache-2.0
"""The page of a run, opened in a real browser where there is one."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from page.__main__ import page
from page.demo import busiest

from .test_bench_suite import cell

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def request(conversation: int, turn: int) -> dict[str, Any]:
    host = 300 * (turn - 1)
    return {
        "conversation": conversation,
        "turn": turn,
        "prompt_tokens": 400 * turn,
        "device_hit_tokens": 0,
        "host_hit_tokens": host,
        "ttft_ms_off": 100.0 * turn,
        "ttft_ms_on": 100.0 * turn - host / 10,
        "stored_bytes": 1 << 20,
        "loaded_bytes": host << 10,
    }


def span(seq: int, what: str, start: float, blocks: int) -> dict[str, Any]:
    made: dict[str, Any] = {"seq": seq, "what": what, "blocks": blocks}
    made["bytes"] = blocks << 16
    return made | {"start": start, "end": start + 0.002}


SPANS = [
    span(1, "store", 1.000, 90),
    span(1, "forward", 1.002, 0),
    span(2, "load", 2.000, 8),
    span(2, "store", 2.002, 4),
    span(2, "forward", 2.004, 0),
]


RESTART = {
    "prompt_tokens": 1795,
    "cached_tokens": 1760,
    "loaded_tokens": 1728,
    "ttft_ms_from_files": 199.4,
    "ttft_ms_computed": 2444.0,
}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The folder of a demo with six requests."""
    requests = [request(c, t) for t in (1, 2, 3) for c in (1, 2)]
    turn: dict[str, Any] = {"turn": 1, "prompt_tokens": 400, "device_hit_tokens": 0}
    turn |= {"host_hit_tokens": 0, "ttft_ms_off": 100.0, "ttft_ms_on": 90.0}
    report = {
        "version": "0.0 <b>",
        "conversation_tokens": 2400,
        "device_cache_tokens": 600,
        "host_tier_tokens": 4000,
        "identical_outputs": True,
        "median_ttft_ms_off": 200.0,
        "median_ttft_ms_on": 170.0,
        "failures": [],
        "restart": RESTART,
        "turns": [turn],
        "requests": requests,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "spans.jsonl").write_text("\n".join(map(json.dumps, SPANS)))
    return tmp_path


class Links(HTMLParser):
    """Whatever a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]


def test_the_page_of_a_demo_fetches_nothing(demo: Path) -> None:
    text = page(demo)
    links = Links(text).found
    assert len(links) == 4 and all(link.startswith("data:image/svg") for link in links)
    assert "@import" not in text and "url(" not in text and "<script" not in text
    assert "0.0 &lt;b&gt;" in text
    assert "200 → 170 ms" in text and "38%" in text


def test_the_step_with_loads_and_stores_is_shown(demo: Path) -> None:
    assert {s["seq"] for s in busiest(SPANS)} == {2}
    assert busiest([span(1, "forward", 0, 0)]) == []
    assert "8 blocks loaded (0.5 MiB), 4 blocks stored (0.2 MiB)" in page(demo)


def test_a_run_without_spans_says_so(demo: Path) -> None:
    (demo / "spans.jsonl").unlink()
    assert "No copies were recorded" in page(demo)


def test_the_turn_after_the_restart_is_shown(demo: Path) -> None:
    cells = "".join(f"<td>{c}</td>" for c in ("1,795", "1,760", "1,728", "199 ms"))
    assert cells in page(demo) and "<td>2444 ms</td>" in page(demo)
    report = json.loads((demo / "report.json").read_text())
    (demo / "report.json").write_text(json.dumps(report | {"restart": None}))
    assert "no tier below the host" in page(demo)


def test_a_failed_demo_is_marked(demo: Path) -> None:
    report = json.loads((demo / "report.json").read_text())
    assert 'class="card bad"' not in page(demo)
    report |= {"identical_outputs": False, "failures": ["the outputs differ"]}
    (demo / "report.json").write_text(json.dumps(report))
    assert page(demo).count('class="card bad"') == 2


def test_the_page_of_a_benchmark(tmp_path: Path) -> None:
    for config, ms in (("none", 100.0), ("core", 60.0)):
        cell(tmp_path, config, {"ttft_ms.host.1024": ms})
    text = page(tmp_path)
    links = Links(text).found
    assert links and all(link.startswith("data:image/png") for link in links)
    assert "<table>" in text and "latency" in text


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither report.json"):
        page(tmp_path)


def test_a_browser_shows_it(demo: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    shown, broken = demo / "report.html", demo / "broken.html"
    shown.write_text(page(demo))
    # What a page without its pictures looks like, to know that it would be seen.
    broken.write_text(re.sub(r'src="data:[^"]+"', 'src="data:,"', page(demo)))
    pictures = [screenshot(browser, path) for path in (shown, broken)]
    inked = [(p[..., :3].min(axis=2) < 0.7).mean() for p in pictures]
    assert inked[0] > 2 * inked[1], "the pictures of the page are not seen"


def screenshot(browser: str, path: Path) -> np.ndarray:
    """What a browser shows of a page: `[height, width, 4]`, 0 to 1."""
    png = path.with_suffix(".png")
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    # It has a profile of its own, and no network.
    flags += [f"--user-data-dir={path.parent / 'profile'}", "--no-sandbox"]
    flags += ["--proxy-server=127.0.0.1:9", "--window-size=1080,1900"]
    command = [browser, *flags, f"--screenshot={png}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert png.is_file(), done.stderr
    return image.imread(png)
