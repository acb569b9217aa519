"""The SFT benchmark on a CPU: what a run leaves behind, the rule of its verdict, its variants."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks.sft_precisions import main, parse_variant, thinned, verdicts
from octetrl.run import demo


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_EXAMPLES", 200)
    words = "--tiny --steps 4 --seeds 2 --batch 4 --layers 1 --hidden 64 --out"
    assert main([*words.split(), str(tmp_path)]) in (0, 1)  # four steps say nothing of the verdict
    record = json.loads((tmp_path / "sft_tiny.json").read_text())
    runs = [row for row in record["rows"] if row["workload"].startswith("seed ")]
    assert [(row["precision"], row["workload"]) for row in runs] == [
        ("bf16", "seed 0"),
        ("fp8", "seed 0"),
        ("bf16", "seed 1"),
        ("fp8", "seed 1"),
    ]
    for plain, fp8 in zip(runs[::2], runs[1::2], strict=True):  # the same start and batch, seen in two formats
        assert plain["loss/first"] != fp8["loss/first"] == pytest.approx(plain["loss/first"], rel=2e-3)
        assert plain["loss/first"] > fp8["loss/final"] == pytest.approx(plain["loss/final"], rel=1e-2)
    assert abs(runs[0]["loss/first"] - runs[2]["loss/first"]) > 2e-3  # another seed, another start
    curve = [point["loss"] for point in record["curves"] if (point["precision"], point["seed"]) == ("fp8", 1)]
    assert len(curve) == 4 and statistics.fmean(curve) == pytest.approx(runs[3]["loss/final"])


def test_verdict() -> None:
    plain = [1.0, 1.1, 1.2]  # standard deviation 0.1
    finals = {"bf16": plain, "near": [1.09, 1.19, 1.29], "far": [1.12, 1.22, 1.32], "below": [0.8, 0.9, 1.0]}
    rows = {str(row["precision"]): row for row in verdicts(finals)}
    found = {name: row["verdict"] for name, row in rows.items()}
    assert found == {"bf16": "baseline", "near": "within", "far": "outside", "below": "outside"}
    assert rows["near"]["loss/difference"] == pytest.approx(0.09)
    assert rows["near"]["loss/seed_noise"] == pytest.approx(0.1)


def test_one_seed_has_no_verdict_and_nan_is_outside() -> None:
    assert [row["verdict"] for row in verdicts({"bf16": [1.0], "fp8": [5.0]})] == ["baseline", "none"]
    assert [row["verdict"] for row in verdicts({"bf16": [1.0], "fp8": [math.nan]})] == ["baseline", "outside"]
    assert verdicts({"bf16": [1.0, 1.0], "fp8": [math.nan, 1.0]})[1]["verdict"] == "outside"


def test_a_thinned_curve_loses_no_step() -> None:
    losses = [float(step) for step in range(1, 104)]
    points = thinned(losses, 50)
    assert len(points) <= 50 and points[0] == (3, 2.0) and points[-1] == (103, 103.0)
    assert thinned(losses[:7], 50) == [(step, float(step)) for step in range(1, 8)]


def test_variants() -> None:
    assert not parse_variant("bf16").fp8.train and parse_variant("fp8").fp8.train
    variant = parse_variant("edges=fp8,bf16_first_layers=1,power_of_two=true")
    assert (variant.name, variant.fp8.train, variant.fp8.bf16_first_layers) == ("edges", True, 1)
    assert variant.fp8.power_of_two
    for wrong in ("fp9", "x=fp8,no_such=1", "x=fp8,wgrad_blocks=oblong"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            parse_variant(wrong)
