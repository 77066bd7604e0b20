"""Line plots as SVG text: the same numbers give the same bytes, and nothing is needed to draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 168, 36, 48  # around the axes
COLOURS = ("#1f6fb4", "#d1642c", "#3a923a", "#8a5cb8", "#777777", "#b03a5b")
Points = Sequence[tuple[float, float]]


def line_plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    dashed: frozenset[str] = frozenset(),
) -> str:
    """Return an SVG of lines with a point at each number. dashed: names of limits, drawn without points."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    to_x, x_ticks = axis(xs, LEFT, WIDTH - RIGHT, log=log_x)
    to_y, y_ticks = axis(ys, HEIGHT - BOTTOM, TOP, log=log_y, from_zero=not log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, title, size=14),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"),
        text(16, (TOP + HEIGHT - BOTTOM) / 2, y_label, anchor="middle", turned=True),
    ]
    for tick in x_ticks:
        parts += [line(to_x(tick), TOP, to_x(tick), HEIGHT - BOTTOM, "#e4e4e4")]
        parts += [text(to_x(tick), HEIGHT - BOTTOM + 16, number(tick), anchor="middle")]
    for tick in y_ticks:
        parts += [line(LEFT, to_y(tick), WIDTH - RIGHT, to_y(tick), "#e4e4e4")]
        parts += [text(LEFT - 6, to_y(tick) + 4, number(tick), anchor="end")]
    for place, (name, points) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in sorted(points))
        dash = ' stroke-dasharray="5 4"' if name in dashed else ""
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
        if name not in dashed:
            parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        height = TOP + 14 + 18 * place
        parts += [f'<rect x="{WIDTH - RIGHT + 12}" y="{height - 9}" width="10" height="10" fill="{colour}"/>']
        parts += [text(WIDTH - RIGHT + 28, height, name)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def axis(
    values: Sequence[float], begin: float, end: float, *, log: bool, from_zero: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Return the map from numbers to places on the page, and where to put marks."""
    low, high = min(values), max(values)
    if log:
        first_power, last_power = math.floor(math.log2(low)), math.ceil(math.log2(high))
        every = 1 + (last_power - first_power) // 9
        ticks = [2.0**power for power in range(first_power, last_power + 1, every)]
        first, last = math.log(min(ticks[0], low)), math.log(max(ticks[-1], high))
        return lambda value: begin + (end - begin) * (math.log(value) - first) / (last - first), ticks
    low = 0.0 if from_zero else low
    step = nice((high - low) / 5)
    ticks = [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
    span = ticks[-1] - ticks[0]
    return lambda value: begin + (end - begin) * (value - ticks[0]) / span, ticks


def nice(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... from a step on."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def line(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{turn}>{escape(words)}</text>'
