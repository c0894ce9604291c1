# SPDX-License-Identifier: Apache-2.0
"""A page that needs nothing beside itself: style inline, pictures as data."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { margin: 0; background: #f3f5f7; color: #1c2733;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 26px; margin: 8px 0 4px; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 4px 0 12px; color: #47535f; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px;
  padding: 16px 20px; margin: 16px 0; overflow-x: auto; }
.cards { display: grid; gap: 12px; margin: 16px 0;
  grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); }
.card { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px;
  padding: 12px 16px; }
.card b { display: block; font-size: 20px; line-height: 1.4; white-space: nowrap; }
.card span { color: #47535f; font-size: 14px; }
.bad b { color: #b3261e; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e1e5ea; }
code { font-size: 13px; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p>{{ subtitle }}</p>
{% if cards %}<div class="cards">
{% for card in cards %}<div class="card{{ ' bad' if card.bad }}">
<b>{{ card.value }}</b><span>{{ card.label }}</span></div>
{% endfor %}</div>{% endif %}
{% for section in sections %}<section>
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.image %}
<img alt="{{ section.title }}" src="{{ section.image }}">
{% endif %}
{{ section.html | safe }}
</section>
{% endfor %}</main>
</body>
</html>
"""


@dataclass(frozen=True)
class Card:
    """A number to see first. `bad`: it is not what it should be."""

    value: str
    label: str
    bad: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page; `html` is trusted, the rest is not."""

    title: str
    text: str = ""
    image: str = ""
    html: str = ""


def svg(figure: Figure) -> str:
    """A figure as the address of an image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _data("image/svg+xml", buffer.getvalue())


def png(path: Path) -> str:
    """A picture file as the address of an image."""
    return _data("image/png", path.read_bytes())


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def render(
    title: str, subtitle: str, cards: Sequence[Card], sections: Sequence[Section]
) -> str:
    """The page."""
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(
        title=title, subtitle=subtitle, cards=cards, sections=sections
    )
