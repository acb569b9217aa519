"""Completions scored by a reward-model folder: each as by a forward of its own, in order, and never a silent 0."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from octetrl.config.fp8_settings import Fp8Config
from octetrl.data.tokenizer import load_tokenizer
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import RolloutStatus, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from octetrl.workers.scalar_models import RewardModelScorer
from tests.e2e.tiny_run import make_model, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("causal") / "model", max_position_embeddings=128)


@pytest.fixture(scope="module")
def reward_model(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a random head, and its tokenizer."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(causal, folder)
    model = scalar_model(causal, new_head=True)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_weights(model, folder)
    return folder


def scalar_model(folder: Path, *, new_head: bool = False) -> ScalarDecoder:
    spec = load_spec(folder, scalar=True)
    model = ScalarDecoder(spec, precision_policy(spec, Fp8Config()))
    load_weights(model, folder, new_head=new_head)
    return model


def scorer(causal: Path, folder: Path, **changes: object) -> RewardModelScorer:
    plain = {"precision": "bf16", "environment.reward": None, "trainer.tokens_per_micro_batch": 64}
    recipe = tiny_recipe(causal, causal / "run", plain | {"environment.reward_model": str(folder)} | changes)
    return RewardModelScorer(recipe, CPU)


def completions(count: int) -> list[tuple[Task, str]]:
    draw = random.Random(4)
    return [
        (Task(id=str(n), prompt=f"{n} + 1 ="), "".join(draw.choice("abc 123") for _ in range(draw.randint(0, 20))))
        for n in range(count)
    ]


def test_each_score_is_that_of_a_forward_of_its_own(causal: Path, reward_model: Path) -> None:
    given = completions(12)
    scores = scorer(causal, reward_model).score(given)
    model, chat = scalar_model(reward_model), ChatTokens(load_tokenizer(reward_model))
    for (task, text), score in zip(given, scores, strict=True):
        ids = torch.tensor(chat.prompt_tokens(task.prompt) + chat.answer_tokens(text))
        context = PackedContext(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        expected = model.scalars(model(ids, torch.arange(len(ids)), context))[-1].item()
        assert score.status is RolloutStatus.SCORED and score.reward == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert len({score.reward for score in scores}) == len(given)


@pytest.mark.parametrize("pad", ["<|end|>", "<|pad|>", None])
def test_scores_are_those_of_transformers_whatever_the_pad_token_is(
    pad: str | None, causal: Path, reward_model: Path, tmp_path: Path
) -> None:
    """Of the config's pad token, which may be the one that ends each answer; without one of each sequence alone."""
    folder, tokenizer = tmp_path / "model", load_tokenizer(reward_model)
    shutil.copytree(reward_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    given, chat = completions(6), ChatTokens(tokenizer)
    lists = [chat.prompt_tokens(task.prompt) + chat.answer_tokens(text) for task, text in given]
    with torch.no_grad():
        alone = [theirs(torch.tensor([ids])).logits[0, 0].item() for ids in lists]
    found = [score.reward for score in scorer(causal, folder, **{"model.dtype": "float32"}).score(given)]
    assert found == pytest.approx(alone, abs=1e-4)


def test_fp8_where_the_rollout_is(causal: Path, reward_model: Path) -> None:
    given = completions(12)
    plain = [score.reward for score in scorer(causal, reward_model).score(given)]
    fp8 = [score.reward for score in scorer(causal, reward_model, precision="fp8_rollout").score(given)]
    assert fp8 != plain
    assert torch.corrcoef(torch.tensor([plain, fp8]))[0, 1] > 0.98


def test_what_has_no_score_is_an_error_and_not_a_zero(causal: Path, reward_model: Path) -> None:
    (task, _text), other = completions(2)
    held = scorer(causal, reward_model)
    assert held.score([]) == []
    too_long, scored = held.score([(task, "x" * 300), other])
    with torch.no_grad():
        held._forward.model.score.weight.fill_(float("inf"))
    (not_finite,) = held.score([other])
    assert scored.status is RolloutStatus.SCORED
    for score, reason in ((too_long, "128 positions"), (not_finite, "not a finite number")):
        assert (score.status, score.reward) == (RolloutStatus.REWARD_ERROR, None) and reason in str(score.detail)


def test_a_causal_model_is_no_reward_model(causal: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.reward_model: .* holds a Qwen3ForCausalLM, no reward model"):
        scorer(causal, causal)
    with pytest.raises(UserError, match=r"environment\.reward_model: model folder .* does not exist"):
        scorer(causal, tmp_path / "nowhere")
