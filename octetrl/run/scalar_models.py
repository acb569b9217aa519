"""Models with a scalar head for a run: the critic, the reward model to be trained, the one to score by.

A critic or a reward model begins with the weights of a causal model and a head of zeros, or with those of a model that
has a scalar head already.
"""

from __future__ import annotations

from pathlib import Path

import torch

from octetrl.config.presets import preset_config
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.fp8.gemm import choose_backend
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.families import load_critic_spec, load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights
from octetrl.models.scalar_decoder import ScalarDecoder


def scalar_decoder(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: torch.device) -> ScalarDecoder:
    """Its weights undefined."""
    backend = choose_backend(device, recipe.fp8.emulate) if policy.uses_fp8("train") else "emulated"
    return ScalarDecoder(spec, policy, dtype=getattr(torch, recipe.model.dtype), device=device, backend=backend)


def build_critic_model(recipe: Recipe, policy_spec: ModelSpec, device: torch.device) -> ScalarDecoder:
    """PPO's value model, from `critic.path` or from where the policy begins."""
    path = recipe.critic.path
    if path is None:
        return build_reward_model(recipe, device)
    spec = load_critic_spec(path, policy_spec, recipe.model.context_length)
    model = scalar_decoder(recipe, spec, precision_policy(spec, recipe.fp8, recipe.numerics), device)
    load_weights(model, path, new_head=True)
    return model


def build_reward_model(recipe: Recipe, device: torch.device) -> ScalarDecoder:
    """Of the recipe's `model` section, with its weights or random ones."""
    spec = scalar_spec(recipe)
    model = scalar_decoder(recipe, spec, precision_policy(spec, recipe.fp8, recipe.numerics), device)
    if recipe.model.init == "random":
        model.random_init(recipe.seed)
    else:
        load_weights(model, Path(str(recipe.model.path)), new_head=True)
    return model


def scalar_spec(recipe: Recipe) -> ModelSpec:
    """Of the recipe's `model` section; a *ForSequenceClassification will do."""
    if recipe.model.preset is not None:
        return spec_from_config(preset_config(recipe.model.preset))
    return load_spec(str(recipe.model.path), scalar=True)
