"""Errors of the layers as a small SVG that needs nothing but a browser: one bar a layer, in the order of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

KINDS = {"embedding": "#8a6d3b", "linear": "#2f6fb7", "experts": "#7a4fa3", "attention": "#3a9a5b", "block": "#b0b0b0"}
LEFT, TOP, BAR, GAP, HEIGHT, BOTTOM = 64, 40, 6, 2, 200, 24
LEAST_WIDTH = 420
TICKS = 4


def layers_svg(layers: Sequence[dict[str, Any]], title: str) -> str:
    """Return an SVG of the layers' errors.

    Args:
        layers: As in the record: "kind", "name", "error" and "own"; an error of None (infinite) is drawn full.
        title: Written above.
    """
    most = max((each["error"] or 0.0 for each in layers), default=0.0) or 1.0
    width = max(LEAST_WIDTH, LEFT + len(layers) * (BAR + GAP) + 16)
    floor = TOP + HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{floor + BOTTOM}" '
        f'viewBox="0 0 {width} {floor + BOTTOM}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{floor + BOTTOM}" fill="#ffffff"/>',
        f'<text x="8" y="16" font-size="13">{escape(title)}</text>',
    ]
    for tick in range(TICKS + 1):
        y = floor - HEIGHT * tick // TICKS
        lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{width - 8}" y2="{y}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{most * tick / TICKS:.3g}</text>')
    for place, each in enumerate(layers):
        share = 1.0 if each["error"] is None else each["error"] / most
        height = round(HEIGHT * share, 1)
        told = f"{each['kind']} {each['name']}: error {text(each['error'])}, own {text(each['own'])}"
        lines.append(
            f'<rect x="{LEFT + place * (BAR + GAP)}" y="{floor - height:.1f}" width="{BAR}" height="{height:.1f}" '
            f'fill="{KINDS[each["kind"]]}"><title>{escape(told)}</title></rect>'
        )
    x = LEFT
    for kind in [kind for kind in KINDS if any(each["kind"] == kind for each in layers)]:
        lines.append(f'<rect x="{x}" y="{floor + 8}" width="8" height="8" fill="{KINDS[kind]}"/>')
        lines.append(f'<text x="{x + 12}" y="{floor + 16}">{kind}</text>')
        x += 24 + 7 * len(kind)
    return "\n".join([*lines, "</svg>"]) + "\n"


def text(value: float | None) -> str:
    return "infinite" if value is None else f"{value:g}"
