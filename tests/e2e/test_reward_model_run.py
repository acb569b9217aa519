"""A reward model in whole runs, trained whole or as adapters with a head: on pairs, resumed, exported, and then scoring
another run's rollouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from examples.preference_pairs import write_pairs
from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.lora import adapter_elements
from octetrl.config.schema import LoraConfig
from octetrl.data.tokenizer import load_tokenizer
from octetrl.layers.context import PackedContext
from octetrl.models.families import load_spec
from octetrl.records import Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.build import build_run
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import one_step, train
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.scalar_models import RewardModelScorer, build_critic_model, build_reward_model
from tests.e2e.tiny_run import read_lines, run, timeless, tiny_recipe
from tests.house.tree import REPO

CPU = torch.device("cpu")
STEPS = 12
LORA: dict[str, Any] = {"model.lora": {"rank": 4, "alpha": 16.0}, "trainer.optimizer.lr": 1e-2}


@pytest.fixture(scope="module", params=[{}, LORA], ids=["whole", "lora"])
def changes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe without an environment, and pairs whose better answer is the longer one."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f"{n + 1} 1 1 1", "rejected": f"{n + 1}"} for n in range(40)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {
        "precision": "fp8",
        "algorithm": {"name": "reward_model", "conversations": str(file), "batch_size": 8},
        "environment": {},
        "trainer.minibatches": 2,
        "trainer.optimizer.lr": 1e-3,
        "checkpoint.every": 4,
        "checkpoint.keep_last": 9,
        "steps": STEPS,
        **request.param,
    }


@pytest.fixture(scope="module")
def trained(model: Path, changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    run(model, folder, changes)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(str(trained), str(tmp_path_factory.mktemp("exported") / "reward_model"))


def test_it_learns_which_answer_is_better(trained: Path) -> None:
    lines = read_lines(trained / "metrics.jsonl")
    assert lines[0]["preference/accuracy"] < 1.0 and lines[-1]["preference/accuracy"] == 1.0
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"] and lines[-1]["preference/margin"] > 0.5
    assert all(line["train/pairs"] == 8 and line["train/updates"] == 2 for line in lines)
    assert not any(name.startswith(("reward/", "rollout/", "mismatch/")) for line in lines for name in line)


def test_a_resumed_run_is_the_whole_run(trained: Path, model: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}")
    train(tiny_recipe(model, tmp_path / "run", changes), resume=True)
    ours, theirs = (folder / "metrics.jsonl" for folder in (tmp_path / "run", trained))
    assert timeless(read_lines(ours)) == timeless(read_lines(theirs))
    last = f"checkpoints/step_{STEPS:06d}"
    for name in checkpoint.load(tmp_path / "run" / last).files:
        assert (tmp_path / "run" / last / name).read_bytes() == (trained / last / name).read_bytes(), name


def test_the_export_is_a_classifier_of_one_label(exported: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(exported)
    assert theirs.config.num_labels == 1 and theirs.score.weight.shape == (1, 64)
    assert not list(exported.glob("optimizer*"))
    tokenizer = load_tokenizer(exported)
    assert theirs.config.pad_token_id == tokenizer.pad_token_id is not None
    batch = tokenizer(["1 + 1 = 2", "3"], return_tensors="pt", padding=True)
    alone = [theirs(**tokenizer(one, return_tensors="pt")).logits for one in ("1 + 1 = 2", "3")]
    torch.testing.assert_close(theirs(**batch).logits, torch.cat(alone), rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match="unsupported architecture Qwen3ForSequenceClassification"):
        load_spec(exported)


def test_a_pad_token_that_ends_answers_is_refused(
    model: Path, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*.json"):
        settings = json.loads(file.read_text())
        if "pad_token" in settings:
            file.write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    recipe = tiny_recipe(tmp_path / "model", tmp_path / "run", changes)
    with pytest.raises(UserError, match="an answer ends with the tokenizer's pad token"):
        train(recipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert run_command(["check", str(tmp_path / "recipe.yaml")]) == 2
    assert "pad token" in capsys.readouterr().err


def test_training_goes_on_from_a_reward_model(exported: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    line = run(exported, tmp_path / "run", changes | {"steps": 1})[0]
    assert line["preference/accuracy"] == 1.0


def test_it_scores_the_rollouts_of_another_run(exported: Path, model: Path, tmp_path: Path) -> None:
    scored = {"environment.reward": None, "environment.reward_model": str(exported), "precision": "fp8"}
    lines = run(model, tmp_path / "run", scored | {"evaluation.every": 2})
    assert all(line["reward/count"] == 8 and line["reward/std"] > 0 and "loss" in line for line in lines)
    assert "eval/accuracy" in lines[1]
    recipe = tiny_recipe(model, tmp_path / "other", scored)
    rows = read_lines(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    alone = RewardModelScorer(recipe, CPU).score([(Task(row["task_id"], row["prompt"]), row["text"]) for row in rows])
    assert [score.reward for score in alone] == [row["reward"] for row in rows]
    report = evaluate_checkpoint(str(tmp_path / "run"), recipe)
    assert report.accuracy is not None


def test_a_critic_may_begin_with_it(exported: Path, model: Path, tmp_path: Path) -> None:
    line = run(model, tmp_path / "run", {"algorithm.name": "ppo", "critic.path": str(exported), "steps": 1})[0]
    assert line["value/mean"] != 0.0  # its head is the reward model's


def test_a_critic_is_whole_beside_a_policy_of_adapters(model: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(model, tmp_path / "run", {"algorithm.name": "ppo", "model.lora": {}})
    critic = build_critic_model(recipe, load_spec(model), CPU)
    assert critic.lora is None and all(parameter.requires_grad for parameter in critic.parameters())


# --- adapters beside frozen weights -------------------------------------------------------------------------


WITH_ADAPTERS = pytest.mark.parametrize("changes", [LORA], ids=["lora"], indirect=True)


@WITH_ADAPTERS
def test_a_checkpoint_holds_adapter_and_head_and_no_model(trained: Path, model: Path) -> None:
    saved = checkpoint.load(trained / f"checkpoints/step_{STEPS:06d}")
    assert not any(name.startswith("model") for name in saved.files)
    config = json.loads((saved.folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == ("SEQ_CLS", str(model))
    states = {name.split("/", 1)[-1] for name in saved.tensors("optimizer.safetensors")}
    assert "score.weight" in states and all(".lora." in name for name in states - {"score.weight", "step_count"})
    assert all(tensor.any() for tensor in load_file(saved.folder / "adapter_model.safetensors").values())


@WITH_ADAPTERS
def test_the_trunk_stays_as_it_is(model: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    live = build_run(tiny_recipe(model, tmp_path / "run", changes))
    try:
        worker = live.workers.worker
        assert isinstance(worker, RewardModelWorker)
        trained, linears = dict(worker.model.trained_parameters()), dict(worker.model.float8_linears())
        assert linears and all(linear.weight is None for linear in linears.values())
        held = {name: linear.codes for name, linear in linears.items()}
        held |= {name: p.detach() for name, p in worker.model.named_parameters() if name not in trained}
        before = {name: tensor.clone() for name, tensor in held.items()}
        for step in (1, 2):
            one_step(live, step)
        assert all(torch.equal(held[name].view(torch.uint8), before[name].view(torch.uint8)) for name in held)
        wanted = adapter_elements(worker.model.spec, LoraConfig(**LORA["model.lora"])) + 64  # as `check` counts them
        assert sum(tensor.numel() for tensor in worker.trainer.state().weights.values()) == wanted
    finally:
        live.close()


@WITH_ADAPTERS
def test_exported_it_is_merged_and_gives_the_adapters_rewards(
    trained: Path, exported: Path, model: Path, changes: dict[str, Any], tmp_path: Path
) -> None:
    tensors = load_file(exported / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name != "score.weight"} == {torch.bfloat16}
    assert not list(exported.glob("adapter*"))
    assert run_command(["export", str(trained), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(tensors["score.weight"], adapter["base_model.model.score.weight"])
    begun = changes | {"model.lora": LORA["model.lora"] | {"path": str(tmp_path / "adapter")}, "precision": "bf16"}
    apart = build_reward_model(tiny_recipe(model, tmp_path / "run", begun), CPU)
    scored = {"environment.reward": None, "environment.reward_model": str(exported), "precision": "bf16"}
    scorer = RewardModelScorer(tiny_recipe(model, tmp_path / "run", scored), CPU)
    given = [(Task(id=str(n), prompt=f"{n} + 1 ="), " 1" * (n % 4)) for n in range(8)]
    rewards = torch.tensor([score.reward for score in scorer.score(given)])
    chat, expected = ChatTokens(load_tokenizer(tmp_path / "adapter")), []
    for task, text in given:
        ids = torch.tensor(chat.prompt_tokens(task.prompt) + chat.answer_tokens(text))
        context = PackedContext(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        expected.append(apart.scalars(apart(ids, torch.arange(len(ids)), context))[-1].detach())
    assert (rewards - torch.stack(expected)).std() < 0.1 * rewards.std(), "merged weights are rounded to BF16"


@pytest.mark.parametrize("recipe", ["demo_reward_model", "demo_reward_model_lora"])
def test_a_recipe_is_sound_and_runs_on_the_examples_pairs(
    recipe: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    write_pairs(pairs, 40)
    overrides = {"model.path": model, "algorithm.conversations": pairs, "output_dir": tmp_path / "run"}
    words = [f"{name}={value}" for name, value in overrides.items()]
    words += ["steps=2", "model.context_length=512", "logging.console=quiet", "cluster.device=cpu"]
    path = REPO / f"recipes/{recipe}.yaml"
    assert run_command(["check", str(path), *words]) == 0
    shown = capsys.readouterr().out
    assert "no problems" in shown and ("adapters" in shown) == recipe.endswith("lora")
    train(load_recipe(path, words))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["train/pairs"] for line in lines] == [32, 32] and lines[1]["preference/accuracy"] > 0
