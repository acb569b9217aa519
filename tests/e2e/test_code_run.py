"""The recipe for code on a CPU: a tiny model that knows a right and some wrong answers learns which one passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.process.levels import Level
from octetrl.process.sandbox import find_sandbox
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from tests.e2e.tiny_run import read_lines, run
from tests.required import missing

RECIPE = Path("recipes/grpo_code_qwen3-0.6b_1gpu_fp8-full.yaml")
RIGHT = "```python\ndef f(x): return x\n```"
WRONG = ("```python\ndef f(x): return 1\n```", "```python\ndef f(x): 1/0\n```", "I can't.")
REASONS = {"1 of 2 tests pass; test 2: wrong", "0 of 2 tests pass; test 1: ZeroDivisionError: division by zero"}


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox() -> None:
    try:
        find_sandbox(Level.LANDLOCK)
    except UserError as error:
        missing(Level.LANDLOCK, str(error))


@pytest.fixture(scope="module")
def knows_some_answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    rows = [json.dumps({"prompt": "f", "answer": answer}) for answer in (RIGHT, *WRONG)]
    (folder / "answers.jsonl").write_text("\n".join(rows))
    changes = {
        "algorithm.name": "sft",
        "algorithm.conversations": str(folder / "answers.jsonl"),
        "algorithm.batch_size": 4,
        "trainer.optimizer.lr": 1.0e-2,
        "precision": "bf16",
        "steps": 40,
    }
    run(model, folder / "run", changes)
    return folder / "run" / "checkpoints" / "step_000040"


def overrides(model: Path, folder: Path) -> list[str]:
    tests = [{"args": [1], "expected": 1}, {"args": ["x"], "expected": "x"}]
    rows = [{"id": "f", "prompt": "f", "function": "f", "tests": tests}]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"model.path={model}", "model.context_length=128", f"output_dir={folder / 'run'}", "cluster.device=cpu",
        "cluster.cpu_threads=1", "rollout.prompts_per_step=1", "rollout.group_size=8", "rollout.max_prompt_tokens=64",
        "rollout.max_new_tokens=60", "engine.page_size=16", "trainer.tokens_per_micro_batch=1024",
        "trainer.optimizer.lr=4e-3", "trainer.optimizer.warmup_steps=0", "environment.eval_size=0",
        f"environment.dataset={folder / 'tasks.jsonl'}",
        "environment.prompt_template='{prompt}'", "environment.reward_workers=1", "evaluation.every=0",
        "logging.console=plain", "logging.tensorboard=false", "checkpoint.every=0", "checkpoint.keep_best=0", "steps=4",
    ]  # fmt: skip


def test_the_recipe_learns_what_passes(
    knows_some_answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_recipe(RECIPE, overrides(knows_some_answers, tmp_path)))
    said = " ".join(capsys.readouterr().out.split())
    assert f"the model's code runs in a sandbox of level {find_sandbox().level}, which does not protect from" in said
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["rollout/reward_error"] == line["rollout/reward_timeout"] == 0 for line in lines)
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.1
    rows = [row for path in sorted((tmp_path / "run" / "rollouts").glob("*")) for row in read_lines(path)]
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    assert all(row["detail"] is None for row in rows if row["reward"])
    assert {row["detail"] for row in rows} > REASONS | {"no ```python block"}


def test_check_accepts_it_and_shows_the_sandbox(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*overrides(model, tmp_path), "environment.dataset=examples/code_tasks.jsonl"]
    assert run_command(["check", str(RECIPE), *arguments]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"sandbox level {find_sandbox().level}" in said
    assert "not protected from: a flaw of the kernel" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("environment.reward_timeout_seconds=9", "environment.reward_timeout_seconds: 9"),
        ("environment.reward_memory_mib=1000", "environment.reward_memory_mib: 1000"),
        ("environment.sandbox.level=jail", "'jail' is not allowed; choose one of landlock, bubblewrap"),
        ("environment.sandbox.python=/bin/false", "'/bin/false' does not run as a Python"),
        ("environment.dataset=null", 'kind code needs the path of a JSONL file of {"prompt": ..., "tests": [...]}'),
    ],
)
def test_check_refuses(change: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", str(RECIPE), *overrides(model, tmp_path), change]) == 2
    assert said in capsys.readouterr().err


def test_a_level_that_the_machine_does_not_give_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    find_sandbox.cache_clear()
    arguments = [*overrides(model, tmp_path), "environment.sandbox.level=bubblewrap"]
    try:
        assert run_command(["check", str(RECIPE), *arguments]) == 2
    finally:
        find_sandbox.cache_clear()
    error = capsys.readouterr().err
    assert "gives no sandbox (bubblewrap: bwrap is not installed); install" in error
    assert "Traceback" not in error
