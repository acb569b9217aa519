"""The pictures of README's first screen and of docs/results.md are drawn from the results as they are now."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

from lab import scaling, tutorial
from lab.picture import LEARNING, PICTURE, SPEED, VLLM, apart, draw
from lab.record import RESULTS


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_the_picture_is_of_the_present_results() -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert drawn == draw(RESULTS), "run `python -m lab.picture`"


def test_picture_and_table_of_several_gpus_are_of_the_present_results() -> None:
    points = [point for path in scaling.shown_on(scaling.PAGE) for point in scaling.read_points(path)]
    series = scaling.series_of(points)
    _, between, _ = scaling.split_page(scaling.PAGE)
    assert scaling.PICTURE.read_text(encoding="utf-8") == scaling.draw(series), "run `python -m lab.scaling`"
    assert between.strip() == scaling.table(series).strip(), "run `python -m lab.scaling`"


def test_the_tutorials_picture_is_of_its_result() -> None:
    result = json.loads((RESULTS / "tutorial_smollm2-135m-instruct_cpu.json").read_text(encoding="utf-8"))
    assert tutorial.PICTURE.read_text(encoding="utf-8") == tutorial.draw(result["rows"])


def test_it_shows_what_the_files_hold_and_no_more(tmp_path: Path) -> None:
    shutil.copy(RESULTS / f"{SPEED}.json", tmp_path)
    alone = texts(draw(tmp_path))
    assert {"25,009", "fp8_full"} <= set(alone) and not any("vLLM" in word or "SmolLM2" in word for word in alone)
    rows = [
        {"precision": precision, "seed": seed, "step": step, "eval/accuracy": accuracy}
        for precision, curve in (("bf16", (0.1, 0.2, 0.4)), ("fp8_full", (0.1, 0.3)))
        for seed in (0, 1)
        for step, accuracy in zip((0, 10, 20), curve, strict=False)
    ]
    unevaluated = {"precision": "bf16", "seed": 0, "step": 25, "reward/mean": 0.5}
    write(tmp_path / f"{LEARNING}.json", [*rows, unevaluated])
    speed = {"precision": "fp8", "workload": "256x512+1024", "rollout/tokens_per_second": 31234.4}
    write(tmp_path / f"{VLLM}.json", [speed])
    svg = draw(tmp_path)
    assert {"31,234", "vLLM fp8", "20", "0.4"} <= set(texts(svg)) and "25" not in texts(svg)
    means = re.findall(r'points="([^"]*)"[^>]*stroke-width="2.4"', svg)
    assert [len(points.split()) for points in means] == [3, 2], "a curve ends where its arm ended"


def test_labels_that_would_overlap_are_moved_apart() -> None:
    placed = apart({"a": (5.0, 50.0), "b": (5.0, 48.0), "c": (5.0, 90.0)})
    assert placed["c"] == (5.0, 90.0) and placed["a"][1] - placed["b"][1] >= 12


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
