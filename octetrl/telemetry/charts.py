"""Line charts and stacked areas as SVG, for a page that needs no network and no script.

Colours are the page's CSS variables (`--run-0`, `--phase-0`, ...), so a chart follows the page's light or dark theme.
Text is in the page's font. A chart is `WIDTH` units wide and scales with its card.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from octetrl.system.text import visible

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22
POINTS = 250  # most that a line has; more are thinned out
HOVERED = 40  # points with a tooltip
DOTS = 30  # points of the longest line of a chart that shows them


def escape(text: str) -> str:
    """`text` for HTML and SVG, with escapes for characters that a page would hide or obey."""
    return html.escape(visible(text))


class Line(NamedTuple):
    """A curve of one run. `low` and `high`: its band, as long as `y`, or empty."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def line_chart(lines: Sequence[Line], x_name: str) -> str:
    """An SVG of all lines on common axes. Values are finite."""
    shown = [_thinned(line) for line in lines if line.x]
    xs = [x for line in shown for x in line.x]
    ys = [y for line in shown for values in (line.y, line.low, line.high) for y in values]
    across, down = _scale(min(xs), max(xs)), _scale(min(ys), max(ys))
    parts = [_axes(across, down, x_name)]
    has_dots = max(len(line.x) for line in shown) <= DOTS
    for line in shown:
        place = [(_x(x, across), _y(y, down)) for x, y in zip(line.x, line.y, strict=True)]
        if line.low:
            edge = [(_x(x, across), _y(y, down)) for x, y in zip(line.x, line.high, strict=True)]
            edge += [(_x(x, across), _y(y, down)) for x, y in zip(line.x, line.low, strict=True)][::-1]
            parts.append(f'<polygon class="band run-{line.colour}" points="{_points(edge)}"/>')
        parts.append(f'<polyline class="line run-{line.colour}" points="{_points(place)}"/>')
        if has_dots:
            parts += (f'<circle class="dot run-{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in place)
        stride = -(-len(place) // HOVERED)
        for (x, y), at, value in list(zip(place, line.x, line.y, strict=True))[::stride]:
            tooltip = escape(f"{line.name}: {shown_number(value)} at {x_name} {shown_number(at)}")
            parts.append(f'<circle class="hover" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{tooltip}</title></circle>')
    return _svg(parts)


def stacked_chart(names: Mapping[str, int], columns: Sequence[Sequence[float]], x: Sequence[float], x_name: str) -> str:
    """An SVG of bars, one for each x; `columns[i]` are the parts of bar i in the order of `names`, which have their
    colours."""
    most = max(sum(column) for column in columns)
    across, down = _scale(min(x), max(x)), _scale(0.0, most)
    room = (WIDTH - LEFT - RIGHT) / len(columns)
    parts = [_axes(across, down, x_name, has_x=False)]
    for place, column in enumerate(columns):
        base = 0.0
        for (name, colour), value in zip(names.items(), column, strict=True):
            top, bottom = _y(base + value, down), _y(base, down)
            base += value
            tooltip = escape(f"{name}: {shown_number(value)} s at {x_name} {shown_number(x[place])}")
            parts.append(
                f'<rect class="phase-{colour}" x="{LEFT + place * room:.2f}" y="{top:.2f}" width="{room * 0.86:.2f}"'
                f' height="{max(0.0, bottom - top):.2f}"><title>{tooltip}</title></rect>'
            )
    ends = ((LEFT, x[0], "start"), (WIDTH - RIGHT, x[-1], "end"))
    for at, value, anchor in ends if len(x) > 1 else ends[:1]:
        parts.append(f'<text x="{at}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x_name} {shown_number(value)}</text>')
    return _svg(parts)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The values as one line of blocks, for a terminal."""
    blocks = "▁▂▃▄▅▆▇█"
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = high - low
    return "".join(blocks[round((value - low) / span * 7) if span else 3] for value in values)


def shown_number(value: float) -> str:
    """A number in few characters."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def _thinned(line: Line) -> Line:
    stride = -(-len(line.x) // POINTS)
    if stride <= 1:
        return line
    kept = [*range(0, len(line.x) - 1, stride), len(line.x) - 1]
    return Line(line.name, line.colour, *([values[i] for i in kept] if values else [] for values in line[2:]))


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Ends of an axis, and the distance of its ticks."""
    if low == high:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    tick = next(step * size for step in (1, 2, 5, 10) if step * size >= rough)
    return math.floor(low / tick) * tick, math.ceil(high / tick) * tick, tick


def _x(x: float, scale: tuple[float, float, float]) -> float:
    return LEFT + (x - scale[0]) / (scale[1] - scale[0]) * (WIDTH - LEFT - RIGHT)


def _y(y: float, scale: tuple[float, float, float]) -> float:
    return HEIGHT - BOTTOM - (y - scale[0]) / (scale[1] - scale[0]) * (HEIGHT - TOP - BOTTOM)


def _axes(
    across: tuple[float, float, float], down: tuple[float, float, float], x_name: str, *, has_x: bool = True
) -> str:
    parts = []
    for number in range(round((down[1] - down[0]) / down[2]) + 1):
        value = down[0] + number * down[2]
        y = _y(value, down)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = shown_number(0.0 if abs(value) < down[2] * 1e-6 else value)
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>')
    count = round((across[1] - across[0]) / across[2])
    for number in range(count + 1 if has_x else 0):
        value = across[0] + number * across[2]
        anchor = "end" if number == count else "middle"
        name = f"{x_name} " if number == count else ""
        shown = shown_number(0.0 if abs(value) < across[2] * 1e-6 else value)
        x = _x(value, across)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{name}{shown}</text>')
    return "".join(parts)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
