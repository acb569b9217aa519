"""`benchmarks.scaling`: picture and table of results with several numbers of workers, and results that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.scaling import BEGIN, END, draw, main, read_points, series_of, shown_on, table
from octetrl.system.errors import UserError
from tests.house.figures import check_table
from tests.house.markdown import tables

Row = dict[str, Any]


def row(precision: str, workers: int, share: float = 1.0, **fields: object) -> Row:
    """A row whose workers each generate `share` of 1,000 tokens/s."""
    return {
        "precision": precision,
        "cluster/kind": "ray",
        "cluster/workers": workers,
        "cluster/device": "cuda",
        "workload": "8x16+32",
        "step/layers": 2,
        "time/step": 10.0 / (workers * share),
        "produce/tokens_per_second": 1000.0 * workers * share,
        "learn/tokens_per_second": 2000.0 * workers * share,
        "step/tokens_per_second": 600.0 * workers * share,
        "produce/efficiency": share,
        "learn/efficiency": share,
        "step/publish_ms": 12.34,
        "mismatch/max_abs_diff": 0.0,
    } | fields


def write(path: Path, rows: Sequence[Row], **head: object) -> Path:
    command = "octetrl bench step --model qwen3-0.6b --gpus 8"
    result = {"bench": "step", "commit": "0", "machine": "a GPU", "command": command, "rows": list(rows)} | head
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def drawn(*paths: Path) -> tuple[str, list[str]]:
    """The picture and its texts."""
    svg = draw(series_of([point for path in paths for point in read_points(path)]))
    return svg, [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


SHARES = {1: 1.0, 2: 0.95, 4: 0.905, 8: 1.021}


@pytest.mark.parametrize("most", [2, 8])
def test_a_line_for_each_precision_and_its_last_point_as_a_share_of_the_first(tmp_path: Path, most: int) -> None:
    counts = [count for count in SHARES if count <= most]
    rows = [row("bf16", count, SHARES[count]) for count in counts] + [row("fp8_full", count) for count in counts]
    svg, texts = drawn(write(tmp_path / "step_a.json", rows))
    assert texts.count(f"{SHARES[most]:.1%}") == 3 and texts.count("100.0%") == 3, "one in each panel"
    assert {"Rollout", "Learning", "Whole step", "bf16", "fp8_full", "Tokens/s of each GPU, qwen3-0.6b"} <= set(texts)
    assert [texts.count(str(count)) for count in counts] == [3] * len(counts)
    lines = [points.split() for points in re.findall(r'points="([^"]*)"[^>]*stroke-width="2.4"', svg)]
    assert sorted(map(len, lines)) == [2, 2, *[len(counts)] * 6], "two names, then two lines in each of three panels"
    bases = re.findall(r'points="([^"]*)" class="base"', svg)
    assert len(bases) == 6 and all(len({point.split(",")[1] for point in base.split()}) == 1 for base in bases)


def test_a_point_is_the_speed_of_one_worker(tmp_path: Path) -> None:
    """Learning has twice the rollout's speed, so its points are twice as far above the axis."""
    svg, _ = drawn(write(tmp_path / "step_a.json", [row("bf16", 1), row("bf16", 4, 0.5)]))
    rollout, learning = [
        [float(point.split(",")[1]) for point in points.split()]
        for points in re.findall(r'points="([^"]*)"[^>]*stroke-width="2.4"', svg)[1:3]
    ]
    axis = 2 * rollout[0] - learning[0]
    assert axis - rollout[1] == pytest.approx((axis - rollout[0]) / 2, abs=0.1)
    assert axis - learning[1] == pytest.approx((axis - learning[0]) / 2, abs=0.1)


def test_points_of_one_line_may_be_of_several_files(tmp_path: Path) -> None:
    one = write(tmp_path / "step_a.json", [row("fp8", 2), row("fp8", 1)])
    four = write(tmp_path / "step_b.json", [row("fp8", 4, 0.9)])
    series = series_of([*read_points(four), *read_points(one)])
    assert [list(points) for points in series.values()] == [[1, 2, 4]] and "90.0%" in drawn(four, one)[1]


def test_a_model_larger_than_one_gpu_is_compared_with_the_fewest(tmp_path: Path) -> None:
    _, texts = drawn(write(tmp_path / "step_a.json", [row("fp8", 2), row("fp8", 8, 0.8)]))
    assert texts.count("80.0%") == 3 and any("the speed with the fewest" in text for text in texts)


def test_workers_on_the_cpu_are_called_so(tmp_path: Path) -> None:
    path = write(tmp_path / "step_a.json", [row("fp8", count) | {"cluster/device": "cpu"} for count in (1, 2)])
    texts = drawn(path)[1]
    assert "Tokens/s of each CPU worker, qwen3-0.6b" in texts and texts.count("CPU workers") == 3
    assert "| CPU workers | model |" in table(series_of(read_points(path)))


def test_the_embedded_worker_is_left_out_beside_one_on_ray(tmp_path: Path) -> None:
    embedded = row("fp8", 1, 1.5) | {"cluster/kind": "embedded"}
    path = write(tmp_path / "step_a.json", [embedded, row("fp8", 1), row("fp8", 2)])
    assert [point.row["cluster/kind"] for point in read_points(path)] == ["ray", "ray"]


def test_the_table_is_what_the_house_checks(tmp_path: Path) -> None:
    rows = [row("bf16", 1), row("bf16", 8, 0.75) | {"mismatch/max_abs_diff": 1.234e-7}]
    page, picture = tmp_path / "page.md", tmp_path / "a.svg"
    page.write_text(f"# Title\n\n{BEGIN}\n{END}\n\nText.\n")
    result = write(tmp_path / "step_a.json", rows)
    for _ in range(2):
        main([str(result), "--page", str(page), "--out", str(picture)])
    (found,) = tables(page.read_text())
    assert found.rows[1] == [
        "8",
        "`qwen3-0.6b`",
        "`bf16`",
        "1.7",
        "6,000",
        "75.0%",
        "12,000",
        "75.0%",
        "12.3",
        "1.2e-07",
    ]
    check_table(found, [one | {"measured_model": "qwen3-0.6b"} for one in rows])
    with pytest.raises(AssertionError, match=r"no measured row is of the model `qwen3-0\.6b`"):
        check_table(found, [one | {"measured_model": "qwen3-8b"} for one in rows])
    with pytest.raises(AssertionError, match="does not hold"):
        check_table(found, [one | {"measured_model": "qwen3-0.6b", "step/publish_ms": 12.0} for one in rows])
    assert page.read_text().startswith("# Title\n") and page.read_text().endswith("\n\nText.\n")
    assert shown_on(page) == [result] and ElementTree.fromstring(picture.read_text()) is not None


def test_results_of_a_dirty_tree_are_marked(tmp_path: Path) -> None:
    series = series_of(read_points(write(tmp_path / "step_a.json", [row("fp8", 1), row("fp8", 2)], commit="0-dirty")))
    assert table(series).count("†") == 2


TWO = [row("fp8", 1), row("fp8", 2)]
# fmt: off
REFUSED: list[tuple[list[tuple[list[Row], Row]], str]] = [
    ([([row("fp8", 1)], {})], "no precision was measured with several numbers of workers"),
    ([([{"precision": "fp8", "workload": "8x16+32"}], {})], "no row has a number of workers"),
    ([(TWO, {"bench": "train"})], "not a result of `octetrl bench step`"),
    ([([], {})], "no row has a number of workers"),
    ([([*TWO, row("fp8", 2)], {})], "two rows are of qwen3-0.6b, fp8, 2 workers"),
    ([([*TWO, row("fp8", 4) | {"step/layers": 3}], {})], "their layers differ"),
    *(
        ([([row("fp8", count, **{field: value}) for count, value in ((1, "a"), (2, "b"))], {})], f"their {name} differ")
        for field, name in (
            ("step/optimizer_states", "optimizer states"),
            ("step/master", "masters"),
            ("step/gradient_sums", "gradient sums"),
            ("cluster/gradients", "gradients"),
        )
    ),
    ([([*TWO, row("fp8", 4) | {"time/step": None}], {})], "time/step is None, a number above 0 is needed"),
    ([([*TWO, row("fp8", 4, **{"cluster/tensor_parallel": 2}), row("fp8", 8, **{"cluster/tensor_parallel": 1})], {})],
     "their tensor parallels differ"),
    ([([row("fp8", 1), row("fp8", 2) | {"cluster/workers": 2.5}], {})], "cluster/workers is 2.5, a whole number"),
    ([([row("fp8", 1), row("fp8", 2) | {"cluster/workers": True}], {})], "cluster/workers is True, a number above 0"),
    ([([row("fp8", 1), row("fp8", 2) | {"learn/tokens_per_second": float("nan")}], {})], "tokens_per_second is nan, a"),
    ([([row("fp8", 1), row("fp8", 2) | {"learn/tokens_per_second": 10**400}], {})], "tokens_per_second is 1000"),
    ([([row("fp8", 1), row("fp8", 2) | {"mismatch/max_abs_diff": float("nan")}], {})], "a number from 0 on is needed"),
    ([([row("fp8", 1), row("fp8", 2) | {"produce/efficiency": "all"}], {})], "produce/efficiency is 'all', a number"),
    ([([row("fp8", 1), row("fp8", 2) | {"workload": None}], {})], "workload is None, a text is needed"),
    ([(TWO, {"machine": None})], "it does not name its machine and commit"),
    ([([*TWO, row("fp8", 4) | {"step/publish_ms": 0}], {})], "step/publish_ms is 0, a number above 0 is needed"),
    ([(TWO, {}), ([row("bf16", 1) | {"cluster/device": "cpu"}], {})], "their devices differ, 'cuda' and 'cpu'"),
    ([([row("fp8", 2) | {"arm": "1+1", "cluster/trainers": 1}], {})], "results of --roles do not fit, they have no"),
    ([(TWO, {"command": "octetrl bench step --gpus 2"})], "its command does not name the model"),
    ([(TWO, {}), ([row("bf16", 1)], {"machine": "another"})], "their machines differ, 'a GPU' and 'another'"),
    ([(TWO, {}), ([row("bf16", 1, workload="1x2+3")], {})], "their workloads differ, '8x16+32' and '1x2+3'"),
]
# fmt: on


@pytest.mark.parametrize(("files", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, files: list[tuple[list[Row], Row]], says: str) -> None:
    paths = [write(tmp_path / f"step_{number}.json", rows, **head) for number, (rows, head) in enumerate(files)]
    with pytest.raises(UserError) as raised:
        drawn(*paths)
    assert says in str(raised.value) and "\n" not in str(raised.value) and "; " in str(raised.value)


def test_a_page_without_a_place_is_left_as_it_is(tmp_path: Path) -> None:
    page, result = tmp_path / "page.md", write(tmp_path / "step_a.json", TWO)
    page.write_text("# Title\n")
    with pytest.raises(UserError, match="it lacks '<!-- scaling: begin -->'"):
        main([str(result), "--page", str(page), "--out", str(tmp_path / "a.svg")])
    assert page.read_text() == "# Title\n" and not (tmp_path / "a.svg").exists()
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(UserError, match="it shows no results yet"):
        main(["--page", str(page)])
    with pytest.raises(UserError, match=r"a\.svg: cannot be written"):
        main([str(result), "--page", str(page), "--out", str(tmp_path / "no" / "a.svg")])
    with pytest.raises(UserError, match=r"page\.md' is the page"):
        main([str(result), "--page", str(page), "--out", str(page)])


def test_names_are_no_markup(tmp_path: Path) -> None:
    rows = [row("<b>&", 1), row("<b>&", 2)]
    assert "<b>&" in drawn(write(tmp_path / "step_a.json", rows))[1]
