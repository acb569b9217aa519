"""What a run says first and last: how its model is named, and its last screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octetrl.config.load import dump_recipe, recipe_from_mapping
from octetrl.fp8.architectures import Capability
from octetrl.run.report import in_force, last_screen, model_name
from octetrl.telemetry.report_data import RunRecord


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("tiny", "tiny"),
        ("models/Qwen3-0.6B", "models/Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", "models/Qwen3-0.6B"),
        ("runs/demo/sft/export", "sft/export"),
        ("runs/first/checkpoints/step_000030", "runs/first@30"),
        ("/scratch/runs/first/checkpoints/step_000030", "runs/first@30"),
        ("/c/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", "Qwen/Qwen3-0.6B"),
        ("runs/first/checkpoints/step_best", "checkpoints/step_best"),
    ],
)
def test_a_model_is_named_by_what_a_person_knows(model: str, name: str) -> None:
    assert model_name(model) == name


def test_the_last_screen_has_the_best_evaluation_times_and_commands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tree = {
        "model": {"preset": "tiny", "init": "random", "tokenizer": "none"},
        "environment": {"dataset": "chain_sum", "eval_size": 4},
        "output_dir": str(folder),
    }
    recipe = recipe_from_mapping(tree)
    (folder / "config.yaml").write_text(dump_recipe(recipe))
    times = {"time/step": 4.0, "time/rollout": 1.0, "time/train": 3.0}
    steps: list[dict[str, float]] = [
        {"step": 1, "reward/mean": 0.1, **times},
        {"step": 2, "reward/mean": 0.3, "eval/accuracy": 0.5, **times},
        {"step": 3, "reward/mean": 0.2, "eval/accuracy": 0.25, **times},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "checkpoints/step_000003").mkdir(parents=True)
    (folder / "checkpoints/step_000003/manifest.json").write_text("{}")
    title, rows = last_screen(folder, recipe)
    found = dict(row for row in rows if row[0])
    assert title == "done: 3 steps in 12 s"
    assert found["best"] == "held-out accuracy 0.500 at step 2; the last: 0.250 at step 3"
    assert found["mean reward"] == "0.100 in the first step, 0.200 in the last"
    assert found["time"] == "train 9.0 s, rollout 3.0 s"
    assert found["weights"] == f"{folder / 'checkpoints/step_000003'} (step 3)"
    assert found["report"] == str(folder / "report.html")
    commands = [text.split("   ")[0].split() for _, text in rows[[label for label, _ in rows].index("next") :]]
    assert commands == [["octetrl", verb, str(folder)] for verb in ("rollouts", "eval", "serve")]


@pytest.mark.parametrize(("capability", "parity"), [((9, 0), "promised"), ((10, 0), "measured")])
def test_a_run_promises_equal_log_probs_only_where_they_were_tested(
    capability: Capability, parity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    tree = {"model": {"preset": "qwen3-0.6b", "init": "random", "tokenizer": "none"}, "precision": "fp8_full"}
    recipe = recipe_from_mapping({**tree, "environment": {"dataset": "chain_sum"}, "output_dir": "run"})
    assert in_force(recipe)["parity"] == parity


@pytest.mark.parametrize(("precision", "codes"), [("mxfp8", "MXFP8"), ("fp8", "FP8")])
def test_a_run_names_the_format_of_its_linears(precision: str, codes: str) -> None:
    tree = {"model": {"preset": "tiny", "init": "random", "tokenizer": "none"}, "precision": precision}
    recipe = recipe_from_mapping({**tree, "environment": {"dataset": "chain_sum"}, "output_dir": "run"})
    settings = dict(RunRecord(Path("run"), recipe.model_dump(mode="json"), []).settings)
    assert f" in {codes}, KV cache in BF16" in settings["precision"]
