"""Evaluations keep what was said: during a run, and `octetrl eval --out FOLDER`. A run's precision is taken over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from octetrl.cli.main import run_command
from octetrl.data.tokenizer import load_tokenizer
from octetrl.records import SamplingParams
from octetrl.run import evaluate as run_evaluate
from octetrl.run.generate import generate_text
from octetrl.run.loop import train
from octetrl.run.model_source import precision_of, recipe_of_run
from octetrl.system.errors import UserError
from tests.e2e.tiny_run import read_lines, run, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")

Finished = Callable[[str], Path]
EVALUATED = {"precision": "fp8", "evaluation.every": 1, "checkpoint.every": 1, "steps": 2}


@pytest.fixture(scope="module")
def evaluated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    run(model, folder, EVALUATED)
    return folder


def test_the_held_out_answers_of_a_run_are_kept(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = sorted((evaluated / "evaluations").iterdir())
    assert [path.name for path in kept] == ["step_000001.jsonl", "step_000002.jsonl"]
    lines = read_lines(evaluated / "metrics.jsonl")
    for path, line in zip(kept, lines, strict=True):
        rewards = [row["reward"] for row in read_lines(path) if row["reward"] is not None]
        assert sum(rewards) / len(rewards) == pytest.approx(line["eval/reward_mean"])
    trained = {row["prompt"] for path in (evaluated / "rollouts").iterdir() for row in read_lines(path)}
    assert not trained & {row["prompt"] for row in read_lines(kept[0])}
    assert run_command(["rollouts", str(evaluated), "--evaluations", "--step", "2", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in shown] == [row["text"] for row in read_lines(kept[1])]
    assert "Held-out tasks, evaluated after step 2" in (evaluated / "report.html").read_text()


def test_a_resumed_run_has_the_evaluations_of_one_never_interrupted(
    model: Path, tmp_path: Path, evaluated: Path
) -> None:
    run(model, tmp_path / "run", EVALUATED | {"steps": 1})
    later = tmp_path / "run" / "evaluations" / "step_000007.jsonl"
    later.write_text("from a step after the checkpoint\n")
    train(tiny_recipe(model, tmp_path / "run", EVALUATED), resume=True)
    for path in (evaluated / "evaluations").iterdir():
        assert (tmp_path / "run" / "evaluations" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not later.exists()


def test_without_evaluations_there_is_no_folder(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished("fp8_full")
    assert not (folder / "evaluations").exists()
    assert run_command(["rollouts", str(folder), "--evaluations"]) == 2
    assert "has no evaluations/; give a run with evaluation.every above 0" in capsys.readouterr().err


def test_eval_keeps_what_was_said(
    evaluated: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's own recipe; its greedy answers are those of the evaluation after its last step."""
    out = tmp_path / "kept"
    assert run_command(["eval", str(evaluated), "--out", str(out)]) == 0
    of_run = read_lines(evaluated / "evaluations" / "step_000002.jsonl")
    kept = read_lines(out / "rollouts" / "step_000002.jsonl")
    assert [(row["prompt"], row["text"], row["reward"]) for row in kept] == [
        (row["prompt"], row["text"], row["reward"]) for row in of_run
    ]
    content = json.loads((out / "eval.json").read_text())
    (line,) = read_lines(out / "metrics.jsonl")
    assert line["step"] == 2 and line["eval/reward_mean"] == content["models"][0]["estimates"]["reward_mean"]["mean"]
    assert f"wrote {out}; `octetrl rollouts {out}` shows the answers" in capsys.readouterr().out
    assert run_command(["rollouts", str(out)]) == 0 and "4 of 4 groups" in capsys.readouterr().out
    assert run_command(["report", str(out)]) == 0
    assert of_run[0]["prompt"][:20] in (out / "report.html").read_text()
    two = tmp_path / "new" / "two"
    assert run_command(["eval", f"{evaluated}@1", str(model), "--out", str(two)]) == 0
    assert read_lines(two / "1_run@1" / "rollouts" / "step_000001.jsonl")
    assert read_lines(two / "2_model" / "rollouts" / "step_000000.jsonl")
    capsys.readouterr()
    for given, says in [(out, "holds files already"), (out / "eval.json" / "x", "Not a directory")]:
        assert run_command(["eval", str(evaluated), "--out", str(given)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_an_evaluation_names_the_checkpoint_that_it_read(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it samples, the run saves its next step and prunes the one that was read."""
    folder = shutil.copytree(evaluated, tmp_path / "run")
    real = run_evaluate.evaluate

    def while_the_run_goes_on(*args: Any, **options: Any) -> Any:
        (folder / "checkpoints/step_000002").rename(folder / "checkpoints/step_000003")
        return real(*args, **options)

    monkeypatch.setattr(run_evaluate, "evaluate", while_the_run_goes_on)
    assert run_command(["eval", f"{folder}@2", "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/eval.json").read_text())["models"][0]["step"] == 2
    assert read_lines(tmp_path / "out/metrics.jsonl")[0]["step"] == 2
    assert (tmp_path / "out/rollouts/step_000002.jsonl").is_file()


def test_fewer_steps_than_a_run_has_are_refused(evaluated: Path, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(evaluated, tmp_path / "run")
    before = (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"^steps: 1, but the run has 2 steps already; give a larger number$"):
        train(tiny_recipe(model, folder, EVALUATED | {"steps": 1}), resume=True)
    assert (folder / "config.yaml").read_text() == before


def test_a_run_is_generated_from_in_its_own_precision(
    finished: Finished, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished("fp8_full")
    for name in (str(folder), f"{folder}@2", str(folder / "checkpoints" / "step_000002")):
        assert recipe_of_run(name) == folder / "config.yaml"
        precision, sections = precision_of(name, None)
        assert precision == "fp8_full" and sections["fp8"]["kv_cache"] == "calibrated"
    assert precision_of(folder, "bf16") == ("bf16", {}) and precision_of(model, None) == ("bf16", {})
    sampling, cpu = SamplingParams(max_new_tokens=8), {"device": "cpu"}
    logprobs = {
        precision: generate_text(str(folder), ["1 + 2 ="], sampling, precision=precision, cluster=cpu)[0][0].logprobs
        for precision in (None, "fp8_full", "bf16")
    }
    assert logprobs[None] == logprobs["fp8_full"] != logprobs["bf16"]
    assert run_command(["generate", str(folder), "-p", "1 + 2 =", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out


def test_a_run_in_float32_is_generated_from_in_float32(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", {"model.dtype": "float32", "precision": "bf16", "steps": 1})
    prompts, sampling, cpu = ["1 + 2 ="], SamplingParams(max_new_tokens=8, temperature=0.0), {"device": "cpu"}
    own, rounded = (
        generate_text(str(tmp_path / "run"), prompts, sampling, precision=precision, cluster=cpu)[0][0]
        for precision in (None, "bf16")
    )
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_000001", dtype=torch.float64)
    tokenizer = load_tokenizer(model)
    given = tokenizer.apply_chat_template([{"role": "user", "content": prompts[0]}], add_generation_prompt=True)
    tokens = torch.tensor([[*given["input_ids"], *own.token_ids]])
    exact = weights(tokens).logits[0, -len(own.token_ids) - 1 : -1].log_softmax(1)
    exact = exact.gather(1, tokens[0, -len(own.token_ids) :, None])[:, 0]
    assert (exact - torch.tensor(own.logprobs)).abs().max() < 1e-5
    assert own.logprobs != rounded.logprobs
