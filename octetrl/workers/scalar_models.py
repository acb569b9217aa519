"""Models with a scalar head for a run: the critic, the reward model to be trained, the one to score by.

A critic or a reward model begins with the weights of a causal model and a head of zeros, or with those of a model that
has a scalar head already. A reward model may have adapters (`model.lora`); a critic is whole, whatever the policy has.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from octetrl.config.schema import LoraConfig, Recipe
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.layers.weight_memory import LoadCount
from octetrl.models.families import load_critic_spec
from octetrl.models.hf_weights import load_weights
from octetrl.models.peft_adapters import begin_adapters
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.peers import ALONE, Peers
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
    backend = choose_backend(device, recipe.fp8.emulate) if policy.uses_fp8("train") else "emulated"
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
