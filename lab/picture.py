"""The picture of README's first screen, drawn from the files in `lab/results/` and nothing else.

    python -m lab.picture

Left: generation speed by precision, from `rollout_qwen3-8b.json`, and vLLM's from `vllm_qwen3-8b*.json` if there
are such files: of each precision its fastest run. Right: SmolLM2's held-out accuracy while training, from
`learning_smollm2-135m-instruct.json` (learning.py), a thin line per seed and a thick mean; without the file there
is no such panel.

The SVG is written by hand, so that the same results give the same bytes. It has colours for light and for dark pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from lab.record import RESULTS

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "speed_and_learning.svg"
SPEED, VLLM, LEARNING = "rollout_qwen3-8b", "vllm_qwen3-8b", "learning_smollm2-135m-instruct"
WORKLOADS = {"256x512+1024": "256 requests × 512 + 1,024 tokens", "128x512+4096": "128 requests × 512 + 4,096 tokens"}
PANEL, GAP, MARGIN, TOP, PLOT = 400, 40, 20, 76, 204  # pixels; PLOT: the height of what is below the titles
NAMES, VALUES = 92, 50  # left and right of the bars
BAR = 0.7  # of the height of a row
TICK = 5000  # tokens/s
STYLE = """<style>
svg { --ground: #ffffff; --ink: #1f2328; --muted: #59636e; --grid: #d8dee4; --line: #8c959f;
      --bf16: #6e7f91; --fp8_rollout: #5b9bd5; --fp8_full: #c4500c; --vllm: #4b8b57; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --ink: #e6edf3; --muted: #9198a1; --grid: #2a313a; --line: #656c76;
        --bf16: #8fa1b3; --fp8_rollout: #6cb0ea; --fp8_full: #f0883e; --vllm: #6fbf7f; } }
text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
       paint-order: stroke; stroke: var(--ground); stroke-width: 3px; stroke-linejoin: round; }
.title { font-size: 14px; font-weight: 600; } .note, .tick { fill: var(--muted); } .tick { font-size: 11px; }
.name { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 11.5px; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
</style>"""
Row = dict[str, Any]
Point = tuple[float, float]


def draw(results: Path) -> str:
    """The SVG of the files in `results`."""
    panels = [list(speed_panel(rows_of(results, SPEED) or [], fastest(results, VLLM)))]
    learning = rows_of(results, LEARNING)
    if learning is not None:
        panels.append(list(learning_panel(learning)))
    width, height = 2 * MARGIN + len(panels) * PANEL + (len(panels) - 1) * GAP, TOP + PLOT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        STYLE,
        f'<rect width="{width}" height="{height}" rx="6" style="fill: var(--ground)"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({MARGIN + number * (PANEL + GAP)} 0)">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def rows_of(results: Path, name: str) -> list[Row] | None:
    """The rows of a result; None if there is no such file."""
    path = results / f"{name}.json"
    if not path.is_file():
        return None
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def fastest(results: Path, prefix: str) -> list[Row]:
    """For each precision and workload the fastest row of all files that begin with `prefix`."""
    rows = [row for path in sorted(results.glob(f"{prefix}*.json")) for row in rows_of(results, path.stem) or []]
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: (row["workload"], row["rollout/tokens_per_second"])):
        best[row["workload"], row["precision"]] = row
    return sorted(best.values(), key=lambda row: str(row["precision"]))


# ---------------------------------------------------------------- generation speed


def speed_panel(ours: Sequence[Row], vllm: Sequence[Row]) -> Iterator[str]:
    """Horizontal bars, a group for each workload."""
    bars = {
        workload: [(str(row["precision"]), row["precision"], row) for row in ours if row["workload"] == workload]
        + [(f"vLLM {row['precision']}", "vllm", row) for row in vllm if row["workload"] == workload]
        for workload in WORKLOADS
    }
    fastest = max(row["rollout/tokens_per_second"] for group in bars.values() for _, _, row in group)
    top = -(-int(fastest) // TICK) * TICK
    room = PANEL - NAMES - VALUES
    height = (PLOT - 8) / sum(len(group) + 1.4 for group in bars.values())
    yield text(0, 28, "Generation speed", "title")
    yield text(0, 48, "Qwen3-8B’s shape, random weights, one H200, one round each", "note")
    for tick in range(0, top + 1, TICK):
        x = NAMES + tick / top * room
        yield line([(x, TOP), (x, TOP + PLOT)], "grid" if tick else "axis")
        yield text(x, TOP + PLOT + 17, f"{tick // 1000}k" if tick else "0", "tick middle")
    yield text(NAMES + room / 2, TOP + PLOT + 36, "tokens/s", "tick middle")
    y = TOP + 4.0
    for workload, group in bars.items():
        yield text(NAMES + 6, y + 0.5 * height + 4, WORKLOADS[workload], "note")
        y += height
        for name, colour, row in group:
            speed, middle = row["rollout/tokens_per_second"], y + height * BAR / 2 + 4
            width = speed / top * room
            yield text(NAMES - 8, middle, name, "name end")
            yield (
                f'<rect x="{NAMES}" y="{y:.1f}" width="{width:.1f}" height="{height * BAR:.1f}"'
                f' style="fill: var(--{colour})"/>'
            )
            yield text(NAMES + width + 6, middle, f"{speed:,.0f}", "")
            y += height
        y += 0.4 * height


# ---------------------------------------------------------------- the learning curve


def learning_panel(rows: Sequence[Row]) -> Iterator[str]:
    """Accuracy over steps, a colour for each precision."""
    curves = seeds_of(rows)
    points = [point for seeds in curves.values() for curve in seeds for point in curve]
    last = max(step for step, _ in points)
    top = max(0.1, -(-max(value for _, value in points) // 0.1) * 0.1)
    left, right = 40, 62
    room = PANEL - left - right

    def place(point: Point) -> Point:
        return left + point[0] / last * room, TOP + PLOT - point[1] / top * PLOT

    yield text(0, 28, "Held-out accuracy while training", "title")
    seeds = max(map(len, curves.values()))
    told = "one seed" if seeds == 1 else f"{seeds} seeds and their mean"
    yield text(0, 48, f"SmolLM2-135M learns short sums by GRPO, {told}", "note")
    for tenth in range(round(top * 10) + 1):
        (_, y) = place((0, tenth / 10))
        yield line([(left, y), (left + room, y)], "grid" if tenth else "axis")
        yield text(left - 8, y + 4, f"{tenth / 10:.1f}" if tenth else "0", "tick end")
    for step in ticks(last):
        (x, _) = place((step, 0))
        yield text(x, TOP + PLOT + 17, f"{step:g}", "tick middle")
    yield text(left + room / 2, TOP + PLOT + 36, "training step", "tick middle")
    yield text(0, TOP - 10, "share of tasks answered correctly", "tick")
    ends: dict[str, Point] = {}
    for precision, drawn in curves.items():
        mean = mean_curve(drawn)
        if len(drawn) > 1:
            yield from (line([place(point) for point in curve], "", precision, 1.0, 0.4) for curve in drawn)
        yield line([place(point) for point in mean], "", precision, 2.4)
        ends[precision] = place(mean[-1])
    for precision, (x, y) in apart(ends).items():
        yield (
            f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" class="name" style="fill: var(--{precision})">{escape(precision)}'
            "</text>"
        )


def seeds_of(rows: Sequence[Row]) -> dict[str, list[list[Point]]]:
    """For each precision the curves of its seeds: (step, accuracy) where evaluated."""
    found: dict[str, dict[int, list[Point]]] = {}
    for row in rows:
        if row.get("eval/accuracy") is not None:
            seeds = found.setdefault(str(row["precision"]), {})
            seeds.setdefault(int(row["seed"]), []).append((float(row["step"]), float(row["eval/accuracy"])))
    return {precision: list(seeds.values()) for precision, seeds in found.items()}


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over the seeds, at the steps that all of them reached."""
    values = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in values)))
    return [(step, statistics.fmean(one[step] for one in values)) for step in steps]


def ticks(last: float) -> list[float]:
    """Five to ten round numbers from 0."""
    width = next(width for width in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if last / width <= 10 or width == 1000)
    return [float(step) for step in range(0, int(last) + 1, width)]


def apart(ends: Mapping[str, Point]) -> dict[str, Point]:
    """The labels' places, moved down where two would overlap."""
    placed: dict[str, Point] = {}
    lowest = float("-inf")
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        lowest = max(y, lowest + 15)
        placed[name] = (x, lowest)
    return placed


# ---------------------------------------------------------------- SVG


def text(x: float, y: float, words: str, classes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(words)}</text>'


def line(points: Sequence[Point], css: str, colour: str | None = None, width: float = 1.0, opacity: float = 1.0) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = "" if colour is None else f' style="stroke: var(--{colour})"'
    return (
        f'<polyline points="{places}" class="{css}"{style} fill="none" stroke-width="{width:g}"'
        f' stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the SVG")
    arguments = parser.parse_args()
    arguments.out.write_text(draw(arguments.results), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
