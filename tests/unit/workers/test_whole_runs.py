"""Whole runs of every kind of objective on two workers are those of one; so is an evaluation. Workers are threads.

The numbers of one update are compared closely in tests/unit/trainer/test_many_workers.py and test_many_kinds.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.main import run_command
from octetrl.config.cluster import ClusterConfig
from octetrl.config.load import dump_recipe
from octetrl.run import device
from octetrl.run.build import build_run
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from octetrl.workers import build_workers as build
from tests.e2e.tiny_rewards import by_text
from tests.e2e.tiny_run import read_lines, tiny_recipe
from tests.unit.workers.thread_team import ThreadTeam, unspread

pytestmark = pytest.mark.usefixtures("rewards_here")

GIVEN = {"given:reward": lambda task, text: by_text(task, text)}  # in this process, which starts no other one
ROWS = {
    "pairs": [{"prompt": f"{n} + 1 =", "chosen": f"{n + 1} 1 1", "rejected": f"{n + 2}"} for n in range(12)],
    "answered": [{"prompt": f"{n} + 1 =", "answer": f"so {n + 1}" + " 1" * n} for n in range(12)],
}


def learnt_from(rows: str, name: str) -> dict[str, Any]:
    return {"algorithm": {"name": name, "conversations": rows, "batch_size": 6}, "environment": {}, "precision": "fp8"}


KINDS: dict[str, dict[str, Any]] = {
    "sft": learnt_from("answered", "sft"),
    "dpo": learnt_from("pairs", "dpo"),
    "reward_model": learnt_from("pairs", "reward_model"),
    "rft": {"algorithm": {"name": "rft"}},
    "ppo": {"algorithm": {"name": "ppo", "kl_coefficient": 0.1}, "rollout.group_size": 1, "precision": "fp8_full"},
    "sampled": {"algorithm": {"name": "distill", "distillation": "sampled"}},
    "forward_kl": {"algorithm": {"name": "distill", "distillation": "forward_kl"}},
    "lora": {"model.lora": {"rank": 4}, "algorithm": {"name": "grpo", "kl_coefficient": 0.1}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_objective_runs_on_two_workers(kind: str, model: Path, tmp_path: Path, teams: list[ThreadTeam]) -> None:
    small = {"rollout.prompts_per_step": 3, "rollout.group_size": 2, "rollout.max_new_tokens": 6, "precision": "bf16"}
    changes = small | {"trainer.tokens_per_micro_batch": 64, "steps": 1} | KINDS[kind]
    if kind == "dpo":
        changes["steps"] = 2  # the first has no margin
    algorithm = dict(changes["algorithm"])
    if "conversations" in algorithm:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[algorithm["conversations"]]))
        algorithm["conversations"] = str(file)
    if algorithm["name"] == "distill":
        algorithm["teacher"] = str(model)
    changes["algorithm"] = algorithm
    if "environment" not in changes:
        changes["environment.reward"] = "given:reward"
    found = []
    for name, cluster in (("one", {}), ("two", {"cluster.cpus": 2, "cluster.device": "auto"})):
        train(tiny_recipe(model, tmp_path / name, changes | cluster), given=GIVEN)
        found.append(unspread(read_lines(tmp_path / name / "metrics.jsonl")))
    (team,) = teams
    assert {worker for worker, verb in team.begun if verb == "train"} == {0, 1}
    for expected, line in zip(*found, strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert line.get("mismatch/max_abs_diff", 0.0) == 0.0


def test_an_evaluation_on_two_workers_is_that_of_one(
    model: Path, tmp_path: Path, teams: list[ThreadTeam], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        dump_recipe(tiny_recipe(model, tmp_path / "run", {"evaluation.samples": 2, "evaluation.temperature": 1.0}))
    )
    found = []
    for name, cluster in (("one", []), ("two", ["cluster.cpus=2", "cluster.device=auto"])):
        out = tmp_path / f"{name}.json"
        assert run_command(["eval", str(model), "--recipe", str(recipe), "--out", str(out), *cluster]) == 0
        found.append(json.loads(out.read_text())["models"][0]["by_task"])
    assert found[0] == found[1] and len(found[0]) == 4
    (team,) = teams
    assert {worker for worker, verb in team.begun if verb == "submit"} == {0, 1}
    assert "train" not in {verb for _, verb in team.begun}


def test_one_worker_needs_no_ray_and_several_say_that_they_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name == "ray" or name.startswith(("ray.", "octetrl.workers.ray")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it now raises
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    train(tiny_recipe(model, tmp_path / "one", {"steps": 1, "environment.reward": "given:reward"}), given=GIVEN)
    for cluster in ({"cluster.cpus": 2}, {"cluster.address": "127.0.0.1:6379"}):
        cluster |= {"cluster.device": "auto", "environment.reward": "given:reward"}
        several = tiny_recipe(model, tmp_path / "several", cluster)
        with pytest.raises(UserError, match=r"need Ray; pip install 'octetrl\[ray\]'"):
            train(several, given=GIVEN)
    assert not (tmp_path / "several").exists()


def test_a_run_on_one_of_eight_gpus_names_the_line_to_add(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("octetrl.workers.build_workers.resolve_device", lambda _: device.torch.device("cpu"))
    recipe = tiny_recipe(model, tmp_path / "run", {"cluster.device": "auto", "logging.console": "plain"})
    build_run(recipe).close()
    assert "this run uses one of 8 GPUs; to use all, add to the recipe: cluster: {gpus: 8}" in capsys.readouterr().out
    build_run(recipe.model_copy(update={"cluster": ClusterConfig(device="cpu")})).close()
    assert "GPUs" not in capsys.readouterr().out
