"""A missing path or a folder that can't be written in is refused before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.house.tree import REPO

NO_MODEL = "'gone' does not exist; give a run folder, a checkpoint, or a Hugging Face model folder with config.json"
COMMANDS = [
    (["generate", "gone", "-p", "hi"], NO_MODEL),
    (["generate", "gone@3", "-p", "hi"], NO_MODEL.replace("gone", "gone@3")),
    (["serve", "gone"], NO_MODEL),
    (["eval", "gone", "--recipe", "demo_grpo"], NO_MODEL),
    (["eval", "empty", "--recipe", "demo_grpo"], "'empty' is neither a run folder, nor a checkpoint, nor a Hugging"),
    (["eval", "gone", "--recipe", "demo_grpo", "--out", "/proc/x.json"], "--out: cannot write '/proc/x.json' ("),
    (["eval", "gone", "--recipe", "demo_grpo", "--out", "/proc/x"], "--out: cannot write '/proc/x' ("),
    (["eval", "gone", "--recipe", "demo_grpo", "--out", "out.json"], NO_MODEL),
    (["eval", "gone", "--recipe", "demo_grpo", "--out", "out"], NO_MODEL),
    (["export", "gone", "--to", "out"], NO_MODEL),
    (["report", "gone"], "report: 'gone' does not exist; give the folder of a run"),
    (["report", "empty"], "report: 'empty' has no metrics.jsonl; give the folder of a run"),
    (["train", "demo_grpo", "model.path=gone"], "model folder 'gone' does not exist"),
    (["train", "demo_grpo", "model.path=file"], "model folder 'file' is not a folder; give a Hugging Face folder"),
    (["train", "demo_grpo", "model.path=empty"], "model folder 'empty' has no config.json; give a Hugging Face folder"),
    (
        ["train", "tasks.yaml", "logging.wandb_project=x"],
        "logging.wandb_project: 'x' needs wandb, which is not installed",
    ),
    (["train", "tasks.yaml", "environment.dataset=sums.jsonl"], "environment.dataset: no file 'sums.jsonl'; give a"),
    (
        ["train", "tasks.yaml", "checkpoint.keep_best=2", "checkpoint.best_metric=reward/meen"],
        "checkpoint.best_metric: no run has 'reward/meen'; did you mean 'reward/mean'?",
    ),
    (["train", "demo_sft", "model.path=model", "algorithm.conversations=gone.jsonl"], "no file 'gone.jsonl'; give a"),
    (["train", "demo_grpo", "--resume", "output_dir=gone"], "--resume: 'gone' holds no run (no config.yaml); leave"),
    (["bench", "rollout", "--model", "nomodel"], "--model: 'nomodel' is neither a folder nor one of the presets"),
    (["bench", "train", "--model", "qwen3-8"], "did you mean 'qwen3-8b'"),
    (["bench", "step", "--model", "nomodel"], "--model: 'nomodel' is neither a folder nor one of the presets"),
    (["train", "demo_grpo", "--from", "gone"], "--from: 'gone' is no run, RUN@STEP or checkpoint"),
    (["train", "demo_grpo", f"output_dir={'n' * 300}"], "can't be a folder (File name too long); choose another"),
    (["train", "demo_grpo", "output_dir=/"], "output_dir: '/' is no folder of the run's"),
    (
        ["generate", "", "-p", "hi"],
        "'' names no model; give a run folder, a checkpoint, or a",
    ),
    (["export", "model", "--to", ""], "--to: is empty; give the folder to write"),
    (["export", "model", "--to", "held"], "--to: 'held' exists and is not empty; give a new folder"),
    (["export", "model", "--to", "file"], "--to: cannot write 'file' (Not a directory); give another folder"),
    (["export", "model", "--to", "file/x"], "--to: cannot write 'file/x' (Not a directory); give another folder"),
    (["bench", "step", "--out", "file/x/y"], "--out: cannot write 'file/x' (Not a directory)"),
    (["train", "demo_grpo"], "run `octetrl demo` first"),
    (["train", "demo_tools_sft", "model.path=model"], "no file 'runs/tools/conversations.jsonl'; run `python -m "),
    (["train", "demo_grpo", "output_dir=file/run"], "output_dir: cannot write in 'file/run' (Not a directory)"),
    (["train", "demo_grpo", "output_dir=held"], "output_dir: 'held' already holds a run; continue it with --resume"),
]
TASKS = "model: {path: model}\nenvironment: {kind: jsonl, dataset: sum.jsonl}\noutput_dir: run\n"
SCRIPT = """
import json, sys
sys.modules["torch"] = None  # an import of it now raises
from octetrl.cli.main import run_command
print(json.dumps([run_command(arguments) for arguments in json.loads(sys.argv[1])]))
"""


def test_torch_is_not_imported_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "held").mkdir()
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "held/config.yaml").touch()
    arguments = json.dumps([command for command, _ in COMMANDS])
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [2] * len(COMMANDS), run.stderr
    said = run.stderr.splitlines()
    assert len(said) == len(COMMANDS)
    for line, (command, says) in zip(said, COMMANDS, strict=True):
        assert says in line, command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "held", "model", "tasks.yaml"], (
        "nothing was written"
    )
