"""`octetrl bench` on a CPU: table and file; a wrong input: one line, exit code 2, nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.cli import bench as cli
from octetrl.cli.main import run_command

Capture = pytest.CaptureFixture[str]


def bench(verb: str, out: Path, capsys: Capture, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and the file it writes."""
    capsys.readouterr()
    assert run_command(["bench", verb, "--layers", "1", "--out", str(out), *arguments]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    (path,) = out.glob("*.json")
    assert str(path) in shown.out and "…" not in shown.out
    return shown.out, json.loads(path.read_text())


def test_a_bench_of_every_verb(tmp_path: Path, capsys: Capture) -> None:
    for verb, rounds in (("rollout", "2"), ("train", "1"), ("step", "1")):
        text, record = bench(verb, tmp_path / verb, capsys, "--arms", "precision=bf16,fp8_full", "--rounds", rounds)
        said = [line.split()[3].rstrip(":") for line in text.splitlines() if line.startswith("round ")]
        assert said == ["bf16", "fp8_full", "fp8_full", "bf16"][: 2 * int(rounds)], "forth and back"
        assert (tmp_path / verb / f"{verb}_tiny_1_layers.json").is_file() and record["bench"] == verb
        assert [row["precision"] for row in record["rows"]] == ["bf16", "fp8_full"]
        assert all(row["model"] == "tiny_1_layers" and row[f"time/{verb}"] > 0 for row in record["rows"])


def test_a_recipe_of_ones_own_with_overrides_and_workloads(tmp_path: Path, capsys: Capture) -> None:
    words = ["bench_tiny", "precision=bf16", "engine.max_batch=2", "--workload", "4x4+6", "--workload", "8x5+3"]
    _, record = bench("rollout", tmp_path, capsys, *words, "--sigma", "0.7", "--name", "Long_answers-1.5")
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_tiny_1_layers_Long_answers-1.5.json"]
    names = ["4x4+6 lognormal 0.7 grouped", "8x5+3 lognormal 0.7 grouped"]
    assert [(row["workload"], row["rollout/max_batch"]) for row in record["rows"]] == [(name, 2) for name in names]


def test_a_preset_or_a_folder_takes_the_place_of_the_recipes_model(tmp_path: Path) -> None:
    assert cli.recipe_and_changes([], "qwen3-1.7b", on_gpu=True)[0] == "bench_qwen3-8b"
    assert cli.recipe_and_changes([], "tiny-moe", on_gpu=True)[0] == "bench_tiny"
    assert cli.recipe_and_changes([], None, on_gpu=False) == ("bench_tiny", [])
    recipe, changes = cli.recipe_and_changes(["a=1", "mine.yaml"], "models/some", on_gpu=False)
    assert (recipe, changes) == ("mine.yaml", ['model.path="models/some"', "a=1"])
    for model, said in (
        ("qwen3-1.7b", ("qwen3-1.7b", "random", None)),
        (str(tmp_path), (None, "pretrained", str(tmp_path))),
    ):
        found = cli.load_recipe(*cli.recipe_and_changes([], model, on_gpu=True)).model
        assert (found.preset, found.init, found.path) == said


def test_a_gpu_has_the_tables_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[list[str]] = []

    def measure(arms: list[Any], *_: object) -> list[object]:
        plans.append([arm.workload.name for arm in arms])
        raise KeyboardInterrupt

    monkeypatch.setattr("octetrl.bench.measure.measure", measure)
    monkeypatch.setattr(cli, "refuse_what_does_not_fit", lambda arm: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for verb in ("rollout", "train", "step"):
        run_command(["bench", verb, "--out", str(tmp_path)])
    run_command(["bench", "step", "bench_qwen3-8b", "rollout.prompts_per_step=2", "--workload", "16x8+8"])
    assert plans == [["128x512+4096", "256x512+1024"], ["8x512+3584"], ["512x512+2048-4096"], ["16x8+8"]]


def test_the_file_goes_where_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    small = ["bench", "rollout", "--layers", "1", "--workload", "4x2+2"]
    monkeypatch.chdir(tmp_path)
    assert run_command(small) == 0 and (tmp_path / "rollout_tiny_1_layers.json").is_file()
    (tmp_path / "lab/results").mkdir(parents=True)
    assert run_command(small) == 0 and (tmp_path / "lab/results/rollout_tiny_1_layers.json").is_file()


@pytest.mark.parametrize(("room", "tables"), [(None, 1), (300, 1), (40, 2), (20, 5)])
def test_no_figure_is_cut_and_arms_follow_in_further_tables(
    room: int | None, tables: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli, "terminal_columns", lambda: room)
    row = {"precision": "bf16", "workload": "8x4+4", "time/step": 1.5}
    rows = [{**row, "arm": f"seed={place}", "memory/learn_peak_gb": place + 0.25} for place in range(5)]
    rows[0].pop("memory/learn_peak_gb")
    cli.print_rows("step", "a title", rows)
    out = capsys.readouterr().out
    assert out.count("step s") == out.count("a title") == tables and "…" not in out
    assert out.count("1.50") == 5 and out.count(" - ") == 1 and all(f"seed={place}" in out for place in range(5))
    assert "learn: memory of learning" in " ".join(out.split())
    assert "8x4+4" not in out and "produce" not in out, "one workload, and no such figure"
