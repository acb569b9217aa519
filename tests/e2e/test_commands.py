"""The commands on a finished run, in one process: what they print, and that an export is the model that was trained."""

from __future__ import annotations

import json
import re
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
    text = printed(capsys, "train", str(recipe), "steps=2", "logging.tensorboard=true")
    banner, steps, end = re.split(r"^(?=step 1|done: 2 steps in )", text, flags=re.MULTILINE)
    lines = [line for line in steps.splitlines() if line.startswith("step")]
    assert text.isascii() and banner.startswith("grpo: ") and " parameters\n" in banner
    for words in (
        r"precision  linears of rollout and training in FP8",
        r"device +CPU, \d+ thread.*, [\d.]+ GiB",
        r"data +jsonl .*tasks held out",
        r"step +\d+ prompts x \d+ = \d+ answers of at most \d+ tokens",
        r"run +2 steps",
        rf"folder +{tmp_path / 'run'}",
    ):
        assert re.search(words, banner), words
    assert max(map(len, lines)) <= 120
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert all(word in lines[0] for word in ("reward 0.", "log-probs equal", " s ", " left"))
    folder = tmp_path / "run"
    assert re.search(rf"weights +{folder / 'checkpoints' / 'step_000002'} \(step 2\)", end) and "train " in end
    commands = [line.partition("octetrl ")[2].split("  ")[0].strip() for line in end.splitlines() if "octetrl " in line]
    assert commands == [f"rollouts {folder}", f"eval {folder}", f"serve {folder}"]
    (events,) = folder.glob("events.out.tfevents.*")
    assert b"rollouts/text_summary" in events.read_bytes() and b"recipe/text_summary" in events.read_bytes()


# --- eval ---------------------------------------------------------------------------------------------------


def test_eval_of_a_run(finished: Finished, capsys: Capture) -> None:
    folder = finished("fp8_full")
    arguments = ["eval", str(folder), "--recipe", str(folder / "config.yaml")]
    report, again = (_rows(printed(capsys, *arguments)) for _ in range(2))
    assert 0 < float(report["reward"].split()[0]) < 1
    assert int(report.get("scored", 0)) + int(report["truncated"].split()[0]) == 4
    report.pop("tokens/s")
    assert report.items() <= again.items()
    fewer = printed(capsys, *arguments, "environment.eval_size=2")
    assert "means of 2 tasks" in fewer


def _rows(table: str) -> dict[str, str]:
    """The table's cells by their label, of one model."""
    return {label: cells.strip() for label, _, cells in (line.partition("   ") for line in table.splitlines()[1:])}


def test_eval_of_several_side_by_side(
    finished: Finished, model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = finished("fp8")
    arguments = ["--recipe", str(folder / "config.yaml"), "--k", "1,4", "--temperature", "1"]
    arguments += ["evaluation.right_from=0.5", "--all-tasks", "--out", "eval.json"]
    text = printed(capsys, "eval", str(folder), str(model), *arguments)
    assert all(word in text for word in ("pass@4", "less the first", "wrote eval.json", "no maj@k"))
    content = json.loads((tmp_path / "eval.json").read_text())
    ours, theirs = content["models"]
    assert (ours["target"], theirs["target"]) == (str(folder), str(model))
    assert ours["tasks"] > 60 and all(len(task["rewards"]) == 4 for task in ours["by_task"])
    assert ours["estimates"]["accuracy"]["mean"] < ours["estimates"]["pass_at_4"]["mean"]
    (difference,) = content["differences"]
    assert difference["estimates"]["accuracy"]["mean"] == pytest.approx(
        theirs["estimates"]["accuracy"]["mean"] - ours["estimates"]["accuracy"]["mean"]
    )


def test_eval_says_what_is_wrong_before_it_works(finished: Finished, tmp_path: Path, capsys: Capture) -> None:
    folder = str(finished("fp8"))
    other = tmp_path / "other.json"
    other.write_text('{"models": 1}')
    for words, says in [
        ([folder, str(tmp_path / "gone")], "gone' does not exist; give a run folder, a checkpoint, or"),
        ([folder, folder], "is given twice"),
        (["seed=1"], "no run or model is given"),
        ([folder, "--k", "1,x"], "--k: '1,x' is not a list of whole numbers"),
        ([folder, "--k", "4"], "evaluation.samples: 4"),
        ([folder, "--k", "4", "--samples", "2", "--temperature", "1"], "evaluation.k: "),
        ([folder, "--out", str(tmp_path / "gone" / "eval.json")], "is not a file in a folder that exists"),
        ([folder, "--out", str(other)], "other.json' exists and is no evaluation; give another name, or remove it"),
        ([folder, "--out", ""], "'' names no file or folder"),
        ([folder, "model.path=elsewhere"], "model.path=elsewhere has no effect beside"),
    ]:
        assert run_command(["eval", *words, "--recipe", f"{folder}/config.yaml"]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert other.read_text() == '{"models": 1}'


def test_an_evaluation_that_mostly_fails_is_exit_code_1(finished: Finished, capsys: Capture) -> None:
    folder = str(finished("fp8"))
    arguments = ["eval", folder, "--recipe", f"{folder}/config.yaml"]
    assert run_command([*arguments, "environment.reward=tests.e2e.tiny_rewards:always_wrong"]) == 1
    captured = capsys.readouterr()
    assert "none: no completion could be scored" in captured.out
    assert "4 of 4 rollouts failed in the environment (100%" in captured.err
    assert 'raise RuntimeError("out of order")' in captured.err


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
    for word in ("parameters", "optimizer", "KV cache", "K fp8, V fp8", "sums.jsonl", "grpo"):
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
