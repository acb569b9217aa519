"""Draws curves as an SVG: a panel per name, three in a row, on shared axes; a thin line per seed, a thick mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, TOP, GAP, COLUMNS = 250, 150, 46, 30, 26, 3
INK, MUTED, GRID, LINE = "#1b1b1b", "#6b6b6b", "#dddddd", "#0b62a4"


def panels(curves: Mapping[str, Sequence[Curve]], *, x: str, y: str) -> str | None:
    """Draw `curves`, by the panel's name. The curves of a panel have the same x values. y begins at 0. None: there
    is no point."""
    ends = [point for seeds in curves.values() for curve in seeds for point in curve]
    if not ends:
        return None
    low, high = min(p[0] for p in ends), max(p[0] for p in ends)
    top = 1.0 if max(p[1] for p in ends) <= 1.0 else max(p[1] for p in ends)
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    width, height = columns * (WIDTH + LEFT) + GAP, rows * (HEIGHT + TOP + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, seeds) in enumerate(curves.items()):
        left = LEFT + (number % columns) * (WIDTH + LEFT)
        up = TOP + (number // columns) * (HEIGHT + TOP + GAP)

        def place(point: tuple[float, float], left: int = left, up: int = up) -> str:
            across = (point[0] - low) / ((high - low) or 1.0)
            return f"{left + across * WIDTH:.1f},{up + HEIGHT - point[1] / top * HEIGHT:.1f}"

        parts.append(f'<text x="{left}" y="{up - 9}" font-size="13" font-weight="600">{escape(name)}</text>')
        parts += _axes(left, up, low, high, top, x, y if number % columns == 0 else "")
        parts += [_line(map(place, curve), LINE, 1.0, 0.35) for curve in seeds]
        mean = [(points[0][0], statistics.fmean(p[1] for p in points)) for points in zip(*seeds, strict=True)]
        parts.append(_line(map(place, mean), LINE, 2.2, 1.0))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(left: int, up: int, low: float, high: float, top: float, x: str, y: str) -> list[str]:
    parts = []
    for share in (0.0, 0.5, 1.0):
        at = up + HEIGHT - share * HEIGHT
        parts.append(f'<path d="M{left} {at}H{left + WIDTH}" stroke="{GRID}"/>')
        text = f'<text x="{left - 6}" y="{at + 4}" text-anchor="end" fill="{MUTED}">{share * top:g}</text>'
        parts.append(text)
    for value, anchor, at in ((low, "start", left), (high, "end", left + WIDTH)):
        parts.append(f'<text x="{at}" y="{up + HEIGHT + 14}" text-anchor="{anchor}" fill="{MUTED}">{value:g}</text>')
    middle = left + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{up + HEIGHT + 14}" text-anchor="middle" fill="{MUTED}">{escape(x)}</text>')
    if y:
        parts.append(
            f'<text transform="translate({left - 32} {up + HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
            f' fill="{MUTED}">{escape(y)}</text>'
        )
    return parts


def _line(points: map[str], colour: str, width: float, opacity: float) -> str:
    places = " ".join(points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"'
        f' stroke-opacity="{opacity}" stroke-linejoin="round"/>'
    )
