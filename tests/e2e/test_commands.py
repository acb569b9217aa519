"""The commands on a finished run, in one process: what they print, and that an export is the model that was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from octetrl.cli.main import run_command
from octetrl.layers.context import PackedContext
from octetrl.run.evaluate import evaluate_checkpoint
from tests.e2e.tiny_run import make_model, recipe_tree, run, tiny_recipe
from tests.unit.models.tiny_families import decoder_of, hf_logits

Finished = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    """What a command prints; asserts that it succeeds."""
    capsys.readouterr()
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.err == ""
    return captured.out


# --- train --------------------------------------------------------------------------------------------------


def test_train_prints_a_line_a_step(model: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", {"logging.console": "plain"})))
    lines = printed(capsys, "train", str(recipe), "steps=2").splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert all(word in lines[0] for word in ("reward 0.", "mismatch 1.00000", "rollout tok/s", "step s"))


def test_a_gate_that_closes_is_exit_code_1(model: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "r.yaml"
    changes = {"precision": "fp8_rollout", "mismatch.fail_above": 1.001}
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", changes)))
    assert run_command(["train", str(recipe)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octetrl: the run failed: step 1: mismatch/token_mult_prob_error is 1.")
    assert error.count("\n") == 1


# --- eval ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", "fp8_full"])
def test_eval_of_a_run(precision: str, finished: Finished, capsys: Capture) -> None:
    folder = finished(precision)
    arguments = ["eval", str(folder), "--recipe", str(folder / "config.yaml")]
    report = dict(line.rsplit(maxsplit=1) for line in printed(capsys, *arguments).splitlines())
    again = dict(line.rsplit(maxsplit=1) for line in printed(capsys, *arguments).splitlines())
    assert 0 < float(report["accuracy"]) < 1
    assert report["tasks"] == "4"
    assert int(report["scored"]) + int(report["overlong"]) == 4
    report.pop("tokens/s")
    assert report.items() <= again.items()
    fewer = printed(capsys, *arguments, "environment.eval_size=2")
    assert "tasks           2" in fewer


def test_eval_gives_what_the_run_measured(model: Path, tmp_path: Path) -> None:
    """Of the run, of its checkpoint, and of its export."""
    changes = {"precision": "fp8", "evaluation.every": 2, "steps": 2}
    line = run(model, tmp_path / "run", changes)[-1]
    assert run_command(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    recipe = tiny_recipe(model, tmp_path / "run", changes)
    for target in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "out"):
        assert evaluate_checkpoint(str(target), recipe).accuracy == line["eval/accuracy"]


# --- generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_generate_repeats_itself(precision: str, finished: Finished, capsys: Capture) -> None:
    arguments = ["generate", str(finished("fp8_full")), "-p", "1 + 2 =", "--max-new-tokens", "8"]
    arguments += ["--precision", precision, "--device", "cpu"]
    once = printed(capsys, *arguments, "--seed", "1")
    assert once == printed(capsys, *arguments, "--seed", "1")
    assert once != printed(capsys, *arguments, "--seed", "2")


def test_generate_several(finished: Finished, capsys: Capture) -> None:
    arguments = ["-p", "1 + 2 =", "-p", "3 - 1 =", "-n", "2", "--max-new-tokens", "4", "--device", "cpu"]
    text = printed(capsys, "generate", str(finished("bf16")), *arguments)
    heads = [line for line in text.splitlines() if line.startswith("--- prompt")]
    assert [head.split(":")[0] for head in heads] == [
        f"--- prompt {prompt}, completion {sibling}" for prompt in (1, 2) for sibling in (1, 2)
    ]


# --- check --------------------------------------------------------------------------------------------------


def test_check_of_the_recipe_a_run_saved(finished: Finished, capsys: Capture) -> None:
    text = printed(capsys, "check", str(finished("fp8_full") / "config.yaml"))
    for word in ("parameters", "optimizer", "KV cache", "K fp8, V fp8", "chain_sum", "grpo"):
        assert word in text


# --- export -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_an_export_loads_in_transformers(family: str, model: Path, tmp_path: Path, capsys: Capture) -> None:
    if family == "qwen2":
        untied = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
        model = make_model(tmp_path / "model", **untied)
    run(model, tmp_path / "run", {"precision": "fp8", "steps": 2})
    target = tmp_path / "out"
    assert str(target) in printed(capsys, "export", str(tmp_path / "run"), "--to", str(target))

    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ours = decoder_of(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.eos_token_id == theirs.config.eos_token_id
    prompt = [{"role": "user", "content": "1 + 2 - 3 ="}]
    token_ids_T = torch.tensor(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])
    length = len(token_ids_T)
    with torch.no_grad():
        hidden_TE = ours(
            token_ids_T, torch.arange(length), PackedContext(torch.tensor([0, length], dtype=torch.int32), length)
        )
        torch.testing.assert_close(
            ours.logits(hidden_TE), hf_logits(theirs, token_ids_T, [length]), rtol=1e-4, atol=1e-4
        )

    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    assert (target / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert (target / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
    assert not {"optimizer.safetensors", "cursor.json", "manifest.json"} & {path.name for path in target.iterdir()}
