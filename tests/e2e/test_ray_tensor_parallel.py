"""A run on Ray whose two workers share one model: its steps, its checkpoint and its export are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.installed_ray import ray  # noqa: F401  # isort: skip: the imports of octetrl.workers.ray_* need it

from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.run.build import full_precision
from octetrl.run.export import export_run
from octetrl.run.loop import train
from tests.e2e.tiny_run import make_model, read_lines, tiny_recipe
from tests.grid import WIDE

SHARED: dict[str, Any] = {"cluster.device": "auto", "cluster.cpus": 2, "cluster.tensor_parallel": 2}


def exported(run: Path, to: Path) -> dict[str, torch.Tensor]:
    folder = export_run(str(run), str(to))
    spec = load_spec(folder)
    model = Decoder(spec, full_precision(spec), "train")
    load_weights(model, folder)
    return {name: one.detach() for name, one in model.named_parameters()}


def test_a_run_goes_on_with_whole_models_from_what_shared_ones_saved(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", **WIDE)
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    changes = {"precision": "fp8_full", "checkpoint.every": 1, "checkpoint.keep_last": 5}
    train(tiny_recipe(model, shared, changes | SHARED | {"steps": 2}))
    train(tiny_recipe(model, alone, changes | {"steps": 1}))
    ours, theirs = read_lines(shared / "metrics.jsonl"), read_lines(alone / "metrics.jsonl")
    assert [line["mismatch/max_abs_diff"] for line in ours] == [0.0, 0.0]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)
    first = "rollouts/step_000001.jsonl"
    assert (shared / first).read_bytes() == (alone / first).read_bytes()
    before = exported(shared, tmp_path / "before")
    train(tiny_recipe(model, shared, changes | {"steps": 3}), resume=True)  # one process, with the whole model
    line = read_lines(shared / "metrics.jsonl")[-1]
    assert line["step"] == 3 and line["mismatch/max_abs_diff"] == 0.0
    after = exported(shared, tmp_path / "after")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) // 2
    for name, one in before.items():  # one small step away from what was saved
        torch.testing.assert_close(after[name], one, rtol=0.1, atol=0.01, msg=name)
