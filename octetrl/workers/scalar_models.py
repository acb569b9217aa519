"""Models with a scalar head for a run: the critic, the reward model to be trained, the one to score by.

A critic or a reward model begins with the weights of a causal model and a head of zeros, or with those of a model that
has a scalar head already. A reward model may have adapters (`model.lora`); a critic is whole, whatever the policy has.

**Scoring.** Completions are scored by a trained reward model in a worker (`Workers.score`).

    prompt and completion -> the reward model's own tokens, EOS included, as it was trained on them
                          -> packed like a training batch, one forward, the scalar at each sequence's last token that
                          is not padding, as transformers takes it

A worker has it, not a reward process (environments/reward_workers.py): a reward model is a decoder, a worker scores
a whole step's completions in a few packed forwards on the run's device, with FP8 linears where the rollout's are, and
needs no second CUDA context. A reward process takes completions one by one and times each, because it runs the user's
code; nothing here does.

What comes back is as from them: a finite number, or REWARD_ERROR with a reason, never a silent 0. A sequence longer
than the reward model's positions is such an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from octetrl.config.schema import LoraConfig, Recipe
from octetrl.data.tokenizer import load_tokenizer
from octetrl.environments.scoring import Score, finite_number
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.policy import PrecisionPolicy, precision_policy, scoring_policy
from octetrl.layers.weight_memory import LoadCount
from octetrl.models.families import load_critic_spec, load_reward_spec
from octetrl.models.hf_weights import load_weights
from octetrl.models.peft_adapters import begin_adapters
from octetrl.models.scalar_decoder import ScalarDecoder, pooled_rows
from octetrl.records import RolloutStatus, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong
from octetrl.trainer.packing import PackingLayout, pack_to_score
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import on_device
from octetrl.trainer.scalar_trainer import ScalarTrainer
from octetrl.trainer.sharded_state import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows
from octetrl.workers.model_shape import scalar_spec


def scalar_decoder(
    recipe: Recipe,
    spec: ModelSpec,
    policy: PrecisionPolicy,
    device: torch.device,
    lora: LoraConfig | None = None,
    *,
    fp8_weights: bool = True,
) -> ScalarDecoder:
    """Its weights undefined. `fp8_weights` false: those of FP8 linears have no memory (layers/weight_memory.py)."""
    backend = choose_backend(device, recipe.fp8.emulate, mx=policy.mx) if policy.uses_fp8("train") else "emulated"
    dtype = getattr(torch, recipe.model.dtype)
    return ScalarDecoder(spec, policy, dtype=dtype, device=device, backend=backend, lora=lora, fp8_weights=fp8_weights)


def build_critic_model(
    recipe: Recipe,
    policy_spec: ModelSpec,
    device: torch.device,
    peers: Peers = ALONE,
    count: LoadCount | None = None,
) -> ScalarDecoder:
    """PPO's value model, from `critic.path` or from where the policy begins. `count` is added to."""
    path = recipe.critic.path
    if path is None:
        return _of_the_model_section(recipe, device, peers, count=count)
    spec = load_critic_spec(path, policy_spec, recipe.model.context_length)
    model = _trained(recipe, spec, device, peers)
    _load(model, path, peers, count)
    return model


def build_reward_model(
    recipe: Recipe,
    device: torch.device,
    peers: Peers = ALONE,
    count: LoadCount | None = None,
    pad_token_id: int | None = None,
) -> ScalarDecoder:
    """What a run trains: of the recipe's `model` section, its adapters and the head alone if it has any. `count` is
    added to. `pad_token_id`: the tokenizer's, which the model's config then has."""
    model = _of_the_model_section(recipe, device, peers, recipe.model.lora, count)
    model.spec = replace(model.spec, pad_token_id=pad_token_id)
    if model.lora is not None:
        begin_adapters(model, recipe.seed)
        model.train_adapters_alone()
    return model


class RewardModelScorer:
    """Holds `environment.reward_model`. UserError for a folder that holds no reward model with its tokenizer."""

    def __init__(self, recipe: Recipe, device: torch.device, peers: Peers = ALONE) -> None:
        """`peers`: the workers that load it together."""
        assert recipe.environment.reward_model is not None, "built for a recipe with a reward model"
        folder = Path(recipe.environment.reward_model)
        spec = load_reward_spec(folder)
        try:
            system_prompt = recipe.rollout.system_prompt
            self._chat = ChatTokens(
                load_tokenizer(folder, spec.vocab_size), system_prompt, context_length=spec.max_positions
            )
            policy = scoring_policy(spec, recipe.fp8)
            model = scalar_decoder(recipe, spec, policy, device, fp8_weights=False)
            load_shared(model, peers, lambda model, rows: load_weights(model, folder, loading=rows))
            model.drop_fp8_weights()
        except UserError as error:
            raise UserError(f"environment.reward_model: {error}") from None
        trainer = recipe.trainer
        self._max_positions, self._device = spec.max_positions, device
        self._layout = PackingLayout(trainer.tokens_per_micro_batch, padded_attention=device.type == "cpu")
        self._forward = ScalarTrainer(model, trainer, trainer.optimizer, seed=0, trains=False)

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        tokens = [self._tokens(task, text) for task, text in completions]
        fitting = {
            index: ids for index, ids in enumerate(tokens) if isinstance(ids, tuple) and len(ids) <= self._max_positions
        }
        rewards = dict(zip(fitting, self._rewards(list(fitting.values())), strict=True))
        return [
            _scored(rewards[index]) if index in rewards else self._not_scored(ids) for index, ids in enumerate(tokens)
        ]

    def _tokens(self, task: Task, text: str) -> tuple[int, ...] | TextTooLong | UserError:
        """The reward model's template has the task's tools, and no variables of the policy's."""
        try:
            return self._chat.with_template(task.tools, {}).prompt_tokens(task.prompt) + self._chat.answer_tokens(text)
        except (TextTooLong, UserError) as error:
            return error

    @torch.no_grad()
    def _rewards(self, token_lists: Sequence[Sequence[int]]) -> list[float]:
        rewards = [math.nan] * len(token_lists)
        for packed, places in pack_to_score(token_lists, self._layout):
            micro_batch = on_device(packed, self._device)
            pad = self._forward.model.spec.pad_token_id
            rows_B = pooled_rows(micro_batch.token_ids_T, micro_batch.cu_seqlens_B1, pad)
            for place, reward in zip(places, self._forward.scalars(micro_batch, rows_B).tolist(), strict=True):
                rewards[place] = reward
        return rewards

    def _not_scored(self, ids: tuple[int, ...] | TextTooLong | UserError) -> Score:
        if isinstance(ids, UserError):
            return Score(RolloutStatus.REWARD_ERROR, None, f"environment.reward_model: {ids}")
        length = str(ids) if isinstance(ids, TextTooLong) else f"{len(ids)} tokens"
        detail = f"prompt and completion are {length}, the reward model has {self._max_positions} positions"
        return Score(RolloutStatus.REWARD_ERROR, None, detail)


def _of_the_model_section(
    recipe: Recipe,
    device: torch.device,
    peers: Peers,
    lora: LoraConfig | None = None,
    count: LoadCount | None = None,
) -> ScalarDecoder:
    """With its weights or random ones."""
    model = _trained(recipe, scalar_spec(recipe), device, peers, lora)
    if recipe.model.init == "random":
        model.random_init(recipe.seed)
    else:
        _load(model, str(recipe.model.path), peers, count)
    return model


def _load(model: ScalarDecoder, folder: str, peers: Peers, count: LoadCount | None) -> None:
    load_shared(model, peers, lambda one, rows: load_weights(one, folder, new_head=True, loading=rows), count)


def _trained(
    recipe: Recipe, spec: ModelSpec, device: torch.device, peers: Peers, lora: LoraConfig | None = None
) -> ScalarDecoder:
    """A model to be trained, before its weights are loaded. It has memory only for the weights that it will keep."""
    policy = precision_policy(spec, recipe.fp8)
    updates_all = lora is None and peers.share.count == 1
    model = scalar_decoder(recipe, spec, policy, device, lora, fp8_weights=updates_all)
    keep_owned_rows(model, peers)
    return model


def _scored(reward: float) -> Score:
    try:
        finite_number(reward, "reward model's reward")
    except ValueError as error:
        return Score(RolloutStatus.REWARD_ERROR, None, str(error))
    return Score(RolloutStatus.SCORED, reward)
