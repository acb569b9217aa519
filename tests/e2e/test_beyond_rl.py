"""Whole runs that learn from given conversations, preference pairs, the best of rollouts, or a teacher."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.schema import Recipe
from octetrl.run.build import build_run
from octetrl.run.loop import one_step, train
from octetrl.system.errors import UserError
from tests.e2e.test_objectives import dotted
from tests.e2e.tiny_run import make_model, read_lines, recipe_tree, run, timeless
from tests.house.tree import REPO

pytestmark = pytest.mark.usefixtures("rewards_here")

MESSAGES = [
    {
        "messages": [
            {"role": role, "content": f"{role[0]}{number} {turn}"} for turn in "ab" for role in ("user", "assistant")
        ]
    }
    for number in range(6)
]
ANSWERED = [{"prompt": f"{number} + 1 =", "answer": f"so {number + 1}"} for number in range(5)]
PAIRS = [{"prompt": f"{number} - 1 =", "chosen": "good", "rejected": "a bad one"} for number in range(6)]
FP8 = {"precision": "fp8", "fp8.train": True}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipes' files are, under the names they have there."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "worked.jsonl", MESSAGES)
    write(folder / "bare.jsonl", ANSWERED)
    write(folder / "pairs.jsonl", PAIRS)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokenizer: one layer more."""
    return make_model(tmp_path_factory.mktemp("teacher") / "model", num_hidden_layers=2)


def shipped(name: str, model: Path, output: Path, data: Path, *more: str, own_tasks: bool = False) -> Recipe:
    """recipes/demo_NAME.yaml on the tiny model and data, two steps of four examples. Its own tasks are those of
    reasoning_gym, whose process imports for two seconds."""
    own = ("algorithm.", "rollout.group_size", "precision", *(["environment."] if own_tasks else []))
    words = [f"{key}={value}" for key, value in dotted(recipe_tree(model, output)) if not key.startswith(own)]
    recipe = load_recipe(REPO / "recipes" / f"demo_{name}.yaml")
    if "conversations" in recipe.sources:
        words.append(f"algorithm.conversations={data / Path(recipe.sources['conversations'].path).name}")
    for source, config in recipe.data.sources.items():
        words.append(f"data.sources.{source}.path={data / Path(config.path).name}")
    words += ["algorithm.batch_size=4"] if recipe.algorithm.learns_from != "rollouts" else []
    words += ["environment.reward=tests.e2e.tiny_rewards:by_text", "steps=2", *more]
    return load_recipe(REPO / "recipes" / f"demo_{name}.yaml", words)


def lines_of(recipe: Recipe) -> list[dict[str, Any]]:
    assert recipe.fp8.train, "every recipe here trains in FP8"
    train(recipe)
    return read_lines(Path(recipe.output_dir) / "metrics.jsonl")


def test_sft_over_messages_of_two_files(model: Path, data: Path, tmp_path: Path) -> None:
    lines = lines_of(shipped("sft_messages", model, tmp_path / "run", data, "steps=4"))
    assert [line["data/share/worked"] for line in lines] == [0.75] * 4
    assert lines[-1]["data/epoch/worked"] == 2.0 and lines[-1]["data/too_long"] == 0.0
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preferences_are_learnt(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    more = ("steps=6", "trainer.optimizer.lr=1e-3", "trainer.optimizer.warmup_steps=0")
    lines = lines_of(shipped(name, model, tmp_path / "run", data, *more))
    assert lines[0]["preference/accuracy"] == 0.0 and lines[0]["preference/margin"] == 0.0
    assert lines[-1]["preference/accuracy"] == 1.0 and lines[-1]["preference/margin"] > 0.05
    assert lines[-1]["preference/rejected_logprob"] < lines[0]["preference/rejected_logprob"]
    assert lines[0]["train/samples"] == 8.0, "both answers of four pairs"


@pytest.mark.parametrize(("name", "metric"), [("sft_messages", "loss"), ("dpo", "preference/chosen_logprob"),
                                              ("ipo", "preference/rejected_logprob")])  # fmt: skip
def test_given_data_are_learnt_at_temperature_1(
    name: str, metric: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """The first step's metric is that of transformers' float64 logits, as they are."""
    more = ("steps=1", "rollout.temperature=0.5", "precision=bf16", "fp8.train=false", "model.dtype=float32")
    recipe = shipped(name, model, tmp_path / "run", data, *more)
    with closing(build_run(recipe)) as run:
        assert run.conversations is not None
        place = run.conversations.state()
        samples = run.conversations.next_batch(4)
        run.conversations.restore(place)
        found = one_step(run, 1).metrics
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    logprobs = []
    for sample in samples:
        ids, trained = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask)[1:]
        with torch.no_grad():
            logprobs_NV = theirs(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(logprobs_NV.gather(1, ids[1:, None])[:, 0][trained])
    if metric == "loss":
        expected = -float(torch.cat(logprobs).mean())
    else:
        chosen = metric == "preference/chosen_logprob"
        means = recipe.algorithm.preference_logprobs == "mean"
        answers = [one.mean() if means else one.sum() for one in logprobs]
        expected = float(torch.stack([
            one for one, sample in zip(answers, samples, strict=True) if sample.chosen == chosen
        ]).mean())  # fmt: skip
    assert found[metric] == pytest.approx(expected, rel=1e-4)


def test_the_best_of_rollouts_are_learnt(model: Path, data: Path, tmp_path: Path) -> None:
    lines = lines_of(shipped("rft", model, tmp_path / "run", data, "rollout.group_size=4", own_tasks=True))
    for line in lines:
        assert line["rollout/count"] == 8 and line["train/samples"] == 4, "two of four, in each of two groups"
        assert line["loss"] > 0 and line["mismatch/max_abs_diff"] == 0.0
    above = lines_of(shipped("rft", model, tmp_path / "none", data, "algorithm.reward_threshold=2.0", "steps=1"))
    assert all(line["train/skipped"] == 1.0 for line in above)


@pytest.mark.parametrize("distillation", ["sampled", "reverse_kl", "forward_kl"])
def test_a_teacher_is_learnt_from(distillation: str, model: Path, teacher: Path, data: Path, tmp_path: Path) -> None:
    words = (f"algorithm.teacher={teacher}", f"algorithm.distillation={distillation}", "rollout.group_size=1")
    lines = lines_of(shipped("distill", model, tmp_path / "run", data, *words))
    for line in lines:
        assert line["grad_norm"] > 0 and line["mismatch/max_abs_diff"] == 0.0
    if distillation != "sampled":
        assert lines[1]["loss"] > 0 and 0 < lines[0]["distill/teacher_mass"] <= 1


def test_a_teacher_of_other_tokens_is_refused(model: Path, teacher: Path, data: Path, tmp_path: Path) -> None:
    for folder, message in ((tmp_path, "algorithm.teacher: "), (teacher, "its tokenizer is not the policy's")):
        if folder is teacher:
            folder = tmp_path / "other"
            make_model(folder)
            vocabulary = folder / "tokenizer.json"
            vocabulary.write_text(vocabulary.read_text().replace("<|user|>", "<|human|>"))
        with pytest.raises(UserError, match=message):
            train(shipped("distill", model, tmp_path / "run", data, f"algorithm.teacher={folder}"))


@pytest.mark.parametrize("name", ["sft_messages", "dpo", "distill"])  # from messages, from pairs, from rollouts
def test_check_accepts_its_recipe(
    name: str, model: Path, teacher: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    own = [f"algorithm.teacher={teacher}"] if name == "distill" else []
    path.write_text(dump_recipe(shipped(name, model, tmp_path / "run", data, *own, own_tasks=name == "distill")))
    assert run_command(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "no problems" in shown and f"  algorithm           {name.split('_')[0]}, " in shown
    assert ("reference model" in shown) == (name == "dpo") and ("teacher" in shown) == (name == "distill")


def test_check_names_every_bad_row(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "pairs.jsonl", [PAIRS[0], {"prompt": "p", "chosen": "c"}, {"chosen": "c", "rejected": "r"}])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(shipped("dpo", model, tmp_path / "run", tmp_path)))
    assert run_command(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert "pairs.jsonl:2: no 'rejected'" in said and "pairs.jsonl:3: 'chosen' is a text without a prompt" in said


def test_a_resumed_mixture_is_the_run_never_cut_off(model: Path, data: Path, tmp_path: Path) -> None:
    constant = ("trainer.optimizer.decay=constant",)  # so that the length of the run does not matter
    whole = lines_of(shipped("sft_messages", model, tmp_path / "whole", data, "steps=4", *constant))
    cut = tmp_path / "cut"
    for stop in (1, 3, 4):
        words = (f"steps={stop}", "checkpoint.every=1", *constant)
        train(shipped("sft_messages", model, cut, data, *words), resume=stop > 1)
    assert timeless(read_lines(cut / "metrics.jsonl")) == timeless(whole)


def test_without_rollouts_no_environment_is_needed(model: Path, data: Path, tmp_path: Path) -> None:
    changes = {
        "algorithm.name": "sft",
        "algorithm.conversations": str(data / "worked.jsonl"),
        "algorithm.batch_size": 2,
    }
    changes |= {"precision": "bf16", "environment": {}, "steps": 1}
    (line,) = run(model, tmp_path / "run", changes)
    assert line["train/samples"] == 2.0
    with pytest.raises(UserError, match=r"environment\.dataset: missing"):
        run(model, tmp_path / "evaluated", {**changes, "evaluation.every": 1})
