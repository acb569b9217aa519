"""Draws how the speed of each GPU changes with the number of GPUs, and writes the table beside the picture.

    octetrl bench step --model qwen3-8b --arms precision=bf16,fp8_full --arms cluster.gpus=1,2,4,8
    python -m lab.scaling lab/results/step_qwen3-8b.json

Takes one or several results of `octetrl bench step` with workers, of one machine and one workload. Nothing runs here.
The picture goes into docs/pictures/scaling.svg. The table goes between `<!-- scaling: begin -->` and
`<!-- scaling: end -->` of docs/results.md; its marker names the results, so the house tests compare its numbers with
them. `--out` and `--page` name other files. Without results it takes those that the page shows now.

The picture has a row of panels for each model: rollout, learning, whole step. A line is a precision, and a point is the
tokens/s of one GPU. A thin line continues the speed with the fewest GPUs, and the last point says its share of it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from lab.picture import STYLE, apart, line, text
from lab.record import is_dirty, model_of, run_command
from octetrl.system.errors import UserError

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "results.md"
PICTURE = REPO / "docs" / "pictures" / "scaling.svg"
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
REMEDY = "give results of `octetrl bench step --arms cluster.gpus=1,2,...`"
COUNT, DEVICE = "cluster/workers", "cluster/device"
ROLES = "cluster/trainers"  # only rows of `bench step --roles` have it
PHASES = {
    "Rollout": "produce/tokens_per_second",
    "Learning": "learn/tokens_per_second",
    "Whole step": "step/tokens_per_second",
}
TABLE = (  # heading, field, format
    ("step, s", "time/step", ".1f"),
    ("rollout, tokens/s", "produce/tokens_per_second", ",.0f"),
    ("efficiency", "produce/efficiency", ".1%"),
    ("learning, tokens/s", "learn/tokens_per_second", ",.0f"),
    ("efficiency", "learn/efficiency", ".1%"),
    ("publish, ms", "step/publish_ms", ".1f"),
    ("largest log-prob difference", "mismatch/max_abs_diff", ""),
)
SAME = (  # settings that all points of a line share
    "step/layers", "step/optimizer_states", "step/master", "step/gradient_sums", "cluster/gradients",
    "cluster/tensor_parallel",
)  # fmt: skip

MARGIN, AXIS, GAP, PLOT, LABELS = 20, 48, 14, 186, 54  # pixels; PLOT: width of what is drawn; LABELS: right of it
HEAD, HEIGHT, FOOT = 90, 180, 50  # above the panels, of a panel, below it
PANEL = PLOT + LABELS + GAP
WIDTH = 2 * MARGIN + AXIS + len(PHASES) * PANEL - GAP
COLOURS = {"bf16": "bf16", "fp8_rollout": "fp8_rollout", "fp8": "fp8", "fp8_full": "fp8_full"}
OWN_STYLE = """<style>
svg { --fp8: #7d5ba6; } @media (prefers-color-scheme: dark) { svg { --fp8: #b392d6; } }
.base { stroke-dasharray: 2 3; }
</style>"""
Row = Mapping[str, Any]
Series = dict[tuple[str, str], dict[int, "Point"]]  # model, precision -> number of workers -> point


@dataclass(frozen=True, slots=True)
class Point:
    """A row of a result. `dirty`: measured on other files than those of the commit that the result names."""

    row: Row
    file: Path
    model: str
    machine: str
    dirty: bool


# ---------------------------------------------------------------- results


def read_points(path: Path) -> list[Point]:
    """The rows of several workers in a result of `octetrl bench step`. Raises UserError."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if COUNT in row and ROLES not in row]
    on_ray = [row for row in rows if row.get("cluster/kind") != "embedded"]
    model = model_of(result)
    if not rows or model is None:
        raise UserError(f"{path}: it names no model, or no row has a number of workers; {REMEDY}")
    return [Point(row, path, model, result["machine"], is_dirty(result)) for row in on_ray or rows]


def series_of(points: Sequence[Point]) -> Series:
    """The points by line. Raises UserError for results that one picture cannot show."""
    _refuse_others([(point.machine, *(point.row.get(field) for field in ("workload", DEVICE))) for point in points])
    found: Series = {}
    for point in points:
        key = (point.model, str(point.row.get("precision")))
        one = found.setdefault(key, {})
        count = int(point.row[COUNT])
        if count in one:
            raise UserError(f"two rows are of {key[0]}, {key[1]}, {count} workers; give one of them")
        one[count] = point
    for one in found.values():
        for field in SAME:
            _refuse_others([point.row[field] for point in one.values() if field in point.row])
    if all(len(one) < 2 for one in found.values()):
        raise UserError(f"no precision was measured with several numbers of workers; {REMEDY}")
    return {key: dict(sorted(one.items())) for key, one in found.items()}


def _refuse_others(values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        raise UserError(f"the results differ in more than model, precision and number of workers: {set(values)}")


# ---------------------------------------------------------------- table


def table(series: Series) -> str:
    """The table in Markdown, with the marker that the house tests check it by."""
    unit = unit_of(series)
    heads = [unit, "model", "precision", *(head for head, _, _ in TABLE)]
    files = dict.fromkeys(_in_repository(point.file) for one in series.values() for point in one.values())
    marker = [",".join(files), COUNT, "measured_model", "-", *(field for _, field, _ in TABLE)]
    lines = [
        f"<!-- figures: {' | '.join(marker)} -->",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for (model, precision), one in series.items():
        name = f"`{precision}`"
        for count, point in one.items():
            cells = [_cell(point.row.get(field), form) for _, field, form in TABLE]
            lines.append(f"| {count}{' †' if point.dirty else ''} | `{model}` | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _in_repository(path: Path) -> str:
    whole = path.resolve()
    return whole.relative_to(REPO).as_posix() if whole.is_relative_to(REPO) else str(path)


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form) if form or value == 0 else f"{value:.1e}"


def split_page(page: Path) -> tuple[str, str, str]:
    """The page up to the table, the table, and the rest. Raises UserError if the page does not say where it is."""
    document = page.read_text(encoding="utf-8")
    before, begin, rest = document.partition(BEGIN)
    between, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page}: it lacks '{BEGIN}' or '{END}'; write both where the table belongs")
    return before + begin, between, end + after


def shown_on(page: Path) -> list[Path]:
    """The results of the page's table. Raises UserError if it has none."""
    marker = re.search(r"<!-- figures: ([^\s|]+)", split_page(page)[1])
    if marker is None:
        raise UserError(f"{page}: it shows no results yet; {REMEDY}")
    return [REPO / name for name in marker[1].split(",")]


# ---------------------------------------------------------------- picture


def draw(series: Series) -> str:
    """The SVG: a row of panels for each model, a panel for each phase."""
    models = list(dict.fromkeys(model for model, _ in series))
    height = HEAD + len(models) * (HEIGHT + FOOT) + (len(models) - 1) * HEAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img">',
        STYLE,
        OWN_STYLE,
        f'<rect width="{WIDTH}" height="{height}" rx="6" style="fill: var(--ground)"/>',
    ]
    for number, model in enumerate(models):
        parts.append(f'<g transform="translate({MARGIN} {number * (HEAD + HEIGHT + FOOT)})">')
        own = {key: one for key, one in series.items() if key[0] == model}
        parts += [*_head(model, own), *_panels(own), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def unit_of(series: Series) -> str:
    device = next(iter(next(iter(series.values())).values())).row.get(DEVICE)
    return "GPUs" if device == "cuda" else "CPU workers"


def _head(model: str, series: Series) -> Iterator[str]:
    """The model, what was measured, and the lines' names."""
    point = next(iter(next(iter(series.values())).values()))
    fewest = {min(one) for one in series.values()}
    unit, speed = unit_of(series), "the speed with the fewest"
    if fewest == {1}:
        speed = f"the speed of one {unit[:-1]}"
    yield text(0, 27, f"Tokens/s of each {unit[:-1]}, {model}", "title")
    workload = str(point.row["workload"]).replace("x", " × ")
    yield text(0, 46, f"{point.machine}, {workload} tokens; thin line: {speed}; percentages are of it", "note")
    x = float(WIDTH - 2 * MARGIN)
    for key in reversed(series):
        name = key[1]
        x -= 7.2 * len(name)
        yield f'<text x="{x:.1f}" y="27" class="name" style="fill: var(--{_colour(key)})">{escape(name)}</text>'
        yield line([(x - 22, 23), (x - 6, 23)], "", _colour(key), 2.4)
        x -= 36


def _panels(series: Series) -> Iterator[str]:
    counts = sorted({count for one in series.values() for count in one})
    fastest = max(
        _speed(point, field) for one in series.values() for point in one.values() for field in PHASES.values()
    )
    tick = next(width for width in _widths() if fastest / width <= 5)
    top = -(-fastest // tick) * tick
    low, high = log2(counts[0]), log2(counts[-1])

    def height(speed: float) -> float:
        return HEAD + HEIGHT - speed / top * HEIGHT

    def across(count: int) -> float:
        return 10 + (log2(count) - low) / ((high - low) or 1.0) * (PLOT - 20)

    for number, (phase, field) in enumerate(PHASES.items()):
        yield f'<g transform="translate({AXIS + number * PANEL} 0)">'
        yield text(0, HEAD - 10, phase, "")
        for place in range(round(top / tick) + 1):
            y = height(place * tick)
            yield line([(0, y), (PLOT, y)], "grid" if place else "axis")
            if number == 0:
                yield text(-8, y + 4, _thousands(place * tick), "tick end")
        for count in counts:
            yield text(across(count), HEAD + HEIGHT + 17, str(count), "tick middle")
        yield text(PLOT / 2, HEAD + HEIGHT + 35, unit_of(series), "tick middle")
        ends, shares = dict[str, tuple[float, float]](), dict[str, tuple[str, str]]()
        for key, one in series.items():
            places = [(across(count), height(_speed(point, field))) for count, point in one.items()]
            yield line([places[0], (PLOT, places[0][1])], "base", _colour(key), 1.0)
            yield line(places, "", _colour(key), 2.4)
            yield from (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill: var(--{_colour(key)})"/>' for x, y in places
            )
            if len(one) > 1:
                first, *_, last = one.values()
                ends[key[1]] = (PLOT, places[-1][1])
                shares[key[1]] = f"{_speed(last, field) / _speed(first, field):.1%}", _colour(key)
        for name, (x, y) in apart(ends).items():
            share, colour = shares[name]
            yield f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" style="fill: var(--{colour})">{share}</text>'
        yield "</g>"


def _speed(point: Point, field: str) -> float:
    """Tokens/s of one worker."""
    return float(point.row[field] / point.row[COUNT])


def _colour(key: tuple[str, str]) -> str:
    return COLOURS.get(key[1], "vllm")


def _widths() -> Iterator[float]:
    """Round distances between ticks: 1, 2, 5, 10, ..."""
    return (width * 10**power for power in range(12) for width in (1, 2, 5))


def _thousands(speed: float) -> str:
    return f"{speed / 1000:g}k" if speed >= 1000 else f"{speed:g}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="*", metavar="RESULT.json", help="default: those that the page shows"
    )
    parser.add_argument("--out", type=Path, default=PICTURE, help="the SVG")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown page for the table")
    given = parser.parse_args(words)
    before, _, after = split_page(given.page)
    series = series_of([point for path in given.results or shown_on(given.page) for point in read_points(path)])
    given.out.write_text(draw(series), encoding="utf-8")
    given.page.write_text(f"{before}\n\n{table(series)}\n{after}", encoding="utf-8")
    print(f"{table(series)}wrote {given.out} and {given.page}")


if __name__ == "__main__":
    run_command("scaling", main)
