"""Check a recipe and report all its problems together, one line each, with what to do. No torch.

There are three stages:

    config/problems.py         names, types and ranges of single fields
    `combination_problems`     combinations of fields that are not allowed
    `spec_problems`            fields that the given model does not allow

The second stage also runs if the first one found problems. Each problem names its fields, and a problem with a field
that was already reported is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from octetrl.config.algorithm import RftConfig
from octetrl.config.cluster import cluster_problems
from octetrl.config.lora import adapter_elements, projections, targets_of, unknown_target
from octetrl.config.objective_keys import name_objective
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.problems import schema_problems, unreadable_texts, without_nulls
from octetrl.config.schema import LEAST_TEMPERATURE, CriticConfig, OptimizerConfig, Recipe
from octetrl.config.section import Problem
from octetrl.config.several_environments import mixture_problems, problems_of_each
from octetrl.config.smallest_cache import cache_problems
from octetrl.config.validate_backend import backend_problems, backend_spec_problems
from octetrl.config.validate_environment import environment_problems
from octetrl.config.validate_experts import expert_problems
from octetrl.config.validate_roles import role_problems
from octetrl.config.validate_sandbox import sandbox_problems
from octetrl.config.validate_speculation import speculation_problems
from octetrl.config.validate_tail import tail_problems
from octetrl.config.validate_tensor import tensor_problems
from octetrl.config.validate_training_memory import training_memory_problems
from octetrl.config.validate_without_effect import decay_without_effect, settings_without_effect
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

MOST_ROLLOUTS = 10_000_000  # per step; each rollout is a record in memory
_ROWS = {
    "conversations": '{"prompt": ..., "answer": ...} or {"messages": [...]}',
    "preferences": '{"prompt": ..., "chosen": ..., "rejected": ...}',
}


def build_recipe(tree: dict[str, Any], *, training: bool = True) -> tuple[Recipe | None, list[Problem]]:
    """Build the recipe of a merged tree, or return None and all problems. training: see `combination_problems`."""
    if unreadable := list(unreadable_texts(tree)):
        return None, unreadable
    tree = without_nulls(name_objective(tree))
    try:
        recipe = Recipe.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems, sound = schema_problems(error, tree)
        reported = [field for problem in problems for field in problem.fields]
        reported += ["environment"] if any(field.startswith("environments") for field in reported) else []
        rest = [
            problem
            for problem in combination_problems(_recipe_of(sound), training)
            if not any(_overlap(field, other) for field in problem.fields for other in reported)
        ]
        return None, problems + rest
    problems = list(combination_problems(recipe, training))
    return (None if problems else recipe), problems


def _recipe_of(sound: dict[str, Any]) -> Recipe:
    """The recipe without its wrong fields. A section that needs one of them is left out as a whole, and so on."""
    while True:
        try:
            return Recipe.model_validate_json(json.dumps(sound))
        except ValidationError as error:
            _, smaller = schema_problems(error, sound)
            assert smaller != sound, f"nothing is left out for {error}"
            sound = smaller


def _overlap(field: str, other: str) -> bool:
    """Whether both are the same field, or one is a section that contains the other."""
    return field == other or field.startswith(other + ".") or other.startswith(field + ".")


def combination_problems(recipe: Recipe, training: bool = True) -> Iterator[Problem]:
    """Yield the wrong combinations of a recipe whose single fields are valid.

    training: include the checks that only matter for training."""
    yield from _model_problems(recipe)
    yield from _fp8_problems(recipe)
    yield from _size_problems(recipe)
    yield from _length_problems(recipe)
    if training:
        yield from _algorithm_problems(recipe)
        yield from _critic_problems(recipe)
        yield from chain(training_memory_problems(recipe), settings_without_effect(recipe))
    yield from mixture_problems(recipe)
    yield from problems_of_each(recipe, lambda one: environment_problems(one, training and not recipe.environments))
    yield from problems_of_each(recipe, sandbox_problems)
    yield from chain(speculation_problems(recipe), backend_problems(recipe, training))
    yield from chain(_trainer_problems(recipe), tail_problems(recipe) if training else ())
    yield from chain(cluster_problems(recipe.cluster), role_problems(recipe))
    yield from _run_problems(recipe)


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.path and model.preset:
        text = f"model: path '{model.path}' and preset '{model.preset}' exclude each other; keep one of them"
        yield Problem(("model.path", "model.preset"), text)
    elif not model.path and not model.preset:
        text = "model: give a path (a Hugging Face folder), or a preset with init: random"
        yield Problem(("model.path", "model.preset"), text)
    elif model.preset and model.init == "pretrained":
        text = f"model.preset: '{model.preset}' is a shape without weights; set model.init: random, or give model.path"
        yield Problem(("model.preset", "model.init"), text)
    if model.preset and not model.path and not model.tokenizer:
        text = f"model.tokenizer: preset '{model.preset}' has no tokenizer; give a Hugging Face tokenizer folder"
        yield Problem(("model.tokenizer", "model.preset"), text)
    yield from _master_problems("trainer.optimizer", recipe.trainer.optimizer, model.dtype)
    if model.lora is not None and model.lora.targets is not None:
        twice = sorted({target for target in model.lora.targets if model.lora.targets.count(target) > 1})
        if twice:
            text = f"model.lora.targets: {', '.join(twice)} is named twice; name each projection once"
            yield Problem(("model.lora.targets",), text)
        if not model.lora.targets:
            text = "model.lora.targets: is empty, so nothing would be trained; name projections, or set model.lora=null"
            yield Problem(("model.lora.targets",), text)


def _fp8_problems(recipe: Recipe) -> Iterator[Problem]:
    fp8 = recipe.fp8
    if recipe.model.dtype == "float32" and (fp8.rollout or fp8.train or fp8.kv_cache != "none"):
        text = "model.dtype: float32 has no FP8 path; use bfloat16, or precision: bf16, which turns FP8 off"
        yield Problem(("model.dtype", "fp8.rollout", "fp8.train", "fp8.kv_cache"), text)
    if fp8.kv_cache_tensors != "both" and fp8.kv_cache == "none":
        text = (
            f"fp8.kv_cache_tensors: '{fp8.kv_cache_tensors}' has no effect with fp8.kv_cache 'none'; set it to"
            " 'both', or fp8.kv_cache to 'calibrated', 'dynamic' or 'int8'"
        )
        yield Problem(("fp8.kv_cache_tensors", "fp8.kv_cache"), text)
    if recipe.cluster.device == "cpu" and fp8.emulate is False and (fp8.rollout or fp8.train):
        text = "fp8.emulate: false needs FP8 tensor cores, and a CPU has none; leave it out, or set it to true"
        yield Problem(("fp8.emulate", "cluster.device"), text)


def _size_problems(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    rollouts = rollout.prompts_per_step * rollout.group_size
    if rollouts > MOST_ROLLOUTS:
        text = (
            f"rollout.prompts_per_step: {rollout.prompts_per_step:,} prompts with rollout.group_size"
            f" {rollout.group_size:,} are {rollouts:,} rollouts per step; at most {MOST_ROLLOUTS:,} are allowed"
        )
        yield Problem(("rollout.prompts_per_step", "rollout.group_size"), text)


def _length_problems(recipe: Recipe, positions: int | None = None) -> Iterator[Problem]:
    """positions: of the model, where they are known to be the context's limit."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    lengths = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
    has_rollouts = recipe.algorithm.learns_from == "rollouts" or recipe.evaluation.every > 0
    if recipe.model.context_length < longest and has_rollouts:
        text = (
            f"model.context_length: {recipe.model.context_length} is shorter than rollout.max_prompt_tokens"
            f" {rollout.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens};"
        )
        context = recipe.model.context_length
        if positions is not None:
            text += f" the model has no more positions: lower these, as to {context - context // 2} and {context // 2}"
        elif recipe.algorithm.learns_from == "rollouts":
            text += f" raise it to {longest}, or lower these"
        else:
            text += (
                f" only evaluations use them with {recipe.algorithm.name}: lower them, for example to"
                f" {context - context // 2} and {context // 2}"
            )
        yield Problem(("model.context_length", *lengths), text)
    evaluated = rollout.max_prompt_tokens + (evaluation.max_new_tokens or 0)
    if recipe.model.context_length < evaluated and evaluation.max_new_tokens is not None:
        text = (
            f"evaluation.max_new_tokens: {evaluation.max_new_tokens} and rollout.max_prompt_tokens"
            f" {rollout.max_prompt_tokens} exceed model.context_length {recipe.model.context_length};"
            f" lower it{f', or raise model.context_length to {evaluated}' if positions is None else ''}"
        )
        yield Problem(("evaluation.max_new_tokens", "model.context_length", lengths[0]), text)
    yield from cache_problems(recipe)


def _algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm, rollout = recipe.algorithm, recipe.rollout
    yield from algorithm.problems()
    yield from _data_problems(recipe)
    if algorithm.learns_from != "rollouts":
        if recipe.fp8.kv_cache == "calibrated":
            text = (
                f"fp8.kv_cache: 'calibrated' has no data for calibration with {algorithm.name}, which samples no"
                " rollouts; use 'none', or 'dynamic', which needs no calibration (precision: fp8_full means"
                " 'calibrated')"
            )
            yield Problem(("fp8.kv_cache", "algorithm.name"), text)
        return
    if isinstance(algorithm, RftConfig) and algorithm.best_of_group > rollout.group_size:
        text = (
            f"algorithm.best_of_group: {algorithm.best_of_group} is more than rollout.group_size"
            f" {rollout.group_size}; lower it, or raise rollout.group_size"
        )
        yield Problem(("algorithm.best_of_group", "rollout.group_size"), text)
    if rollout.group_size < 2 and algorithm.needs_siblings:
        text = (
            f"rollout.group_size: with 1, {algorithm.name} has no siblings to compare; use at least 2, commonly 8,"
            f" or algorithm.name: reinforce_pp"
        )
        yield Problem(("rollout.group_size", "algorithm.name"), text)
    for name, value in (("rollout", rollout.temperature), ("evaluation", recipe.evaluation.temperature)):
        if 0 < value < LEAST_TEMPERATURE:
            text = f"{name}.temperature: {value:g} is too small for float32; use {LEAST_TEMPERATURE:g} or more"
            yield Problem((f"{name}.temperature",), text)
    if rollout.temperature == 0:
        text = "rollout.temperature: 0 is greedy, so all answers of a group are equal and teach nothing; use 1.0"
        yield Problem(("rollout.temperature", "algorithm.name"), text)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != off:
            text = (
                f"rollout.{name}: {value} changes the distribution, and the trainer's log-probs would not match;"
                f" train with {off} (`generate` takes --{name.replace('_', '-')})"
            )
            yield Problem((f"rollout.{name}", "algorithm.name"), text)


def _critic_problems(recipe: Recipe) -> Iterator[Problem]:
    critic, name = recipe.critic, recipe.algorithm.name
    if name != "ppo":
        if critic != CriticConfig():
            text = f"critic: {name} has no critic, so the section has no effect; remove it, or use ppo"
            yield Problem(("critic", "algorithm.name"), text)
        return
    if critic.pretrain_steps >= recipe.steps:
        text = (
            f"critic.pretrain_steps: {critic.pretrain_steps} of {recipe.steps} steps leave no step for the policy;"
            f" lower it, or raise steps"
        )
        yield Problem(("critic.pretrain_steps", "steps"), text)
    yield from _optimizer_problems("critic.optimizer", critic.optimizer)
    yield from _master_problems("critic.optimizer", critic.optimizer, recipe.model.dtype)


def _data_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm, sources = recipe.algorithm, recipe.data.sources
    if not isinstance(algorithm, DatasetSettings):
        return
    form = _ROWS[algorithm.learns_from]
    if algorithm.conversations is None and not sources:
        text = f"algorithm.conversations: {algorithm.name} needs the path of a file of {form}, or data.sources"
        yield Problem(("algorithm.conversations", "data.sources", "algorithm.name"), text)
    if algorithm.conversations is not None and sources:
        text = "algorithm.conversations: cannot be combined with data.sources; move it there"
        yield Problem(("algorithm.conversations", "data.sources"), text)


def _optimizer_problems(section: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    if 1.0 in optimizer.betas:
        text = f"{section}.betas: {list(optimizer.betas)} must each be below 1"
        yield Problem((f"{section}.betas",), text)
    yield from decay_without_effect(section, optimizer)


def _master_problems(section: str, optimizer: OptimizerConfig, dtype: str) -> Iterator[Problem]:
    if dtype == "float32" and optimizer.master == "stochastic_rounding":
        text = f"{section}.master: stochastic_rounding is for bfloat16 weights; with dtype float32 use float32"
        yield Problem((f"{section}.master", "model.dtype"), text)


def _trainer_problems(recipe: Recipe) -> Iterator[Problem]:
    trainer, rollout = recipe.trainer, recipe.rollout
    yield from _optimizer_problems("trainer.optimizer", trainer.optimizer)
    samples, of_batch = (
        rollout.prompts_per_step * rollout.group_size,
        ["rollout.prompts_per_step", "rollout.group_size"],
    )
    if isinstance(recipe.algorithm, DatasetSettings):
        samples, of_batch = recipe.algorithm.batch_size, ["algorithm.batch_size"]
    if trainer.minibatches > samples:
        text = (
            f"trainer.minibatches: {trainer.minibatches} optimizer steps cannot share a batch of {samples} samples;"
            f" use at most {samples}"
        )
        yield Problem(("trainer.minibatches", *of_batch), text)


def _run_problems(recipe: Recipe) -> Iterator[Problem]:
    evaluation, checkpoint = recipe.evaluation, recipe.checkpoint
    if "" in recipe.rollout.stop:
        text = "rollout.stop: an empty text would stop every answer at once; remove it"
        yield Problem(("rollout.stop",), text)
    if evaluation.every and not any(one.eval_size for one in recipe.each_environment.values()):
        where = "environments.NAME.eval_size" if recipe.environments else "environment.eval_size"
        text = f"evaluation.every: {where} 0 leaves no held-out tasks; raise that, or set every to 0"
        yield Problem(("evaluation.every", "environment.eval_size"), text)
    if evaluation.samples > 1 and evaluation.temperature == 0:
        text = (
            f"evaluation.samples: {evaluation.samples} greedy answers would all be the same;"
            f" use 1, or an evaluation.temperature above 0"
        )
        yield Problem(("evaluation.samples", "evaluation.temperature"), text)
    if max(evaluation.k, default=0) > evaluation.samples:
        text = (
            f"evaluation.k: {max(evaluation.k)} cannot be estimated from {evaluation.samples} completions a task;"
            f" raise evaluation.samples to at least {max(evaluation.k)}, or lower k"
        )
        yield Problem(("evaluation.k", "evaluation.samples"), text)
    if checkpoint.keep_best and not evaluation.every and checkpoint.best_metric.startswith("eval/"):
        text = (
            f"checkpoint.keep_best: '{checkpoint.best_metric}' is never measured, because evaluation.every is 0;"
            f" set evaluation.every, or checkpoint.keep_best: 0"
        )
        yield Problem(("checkpoint.keep_best", "checkpoint.best_metric", "evaluation.every"), text)
    if recipe.seed >= 2**63 or not all(0 <= one.seed < 2**63 for one in recipe.each_environment.values()):
        text = "seed: seed and environment.seed must be from 0 to 2^63 - 1; choose others"
        yield Problem(("seed", "environment.seed"), text)
    if "\0" in recipe.output_dir:
        yield Problem(("output_dir",), f"output_dir: {recipe.output_dir!r} is not a path, it contains a NUL; remove it")
    if not recipe.output_dir.strip():
        yield Problem(("output_dir",), "output_dir: is empty; give the folder that the run writes, such as runs/first")
    elif not Path(recipe.output_dir).name and Path(recipe.output_dir).is_absolute():
        text = f"output_dir: '{recipe.output_dir}' is the root; give a folder of the run's, such as runs/first"
        yield Problem(("output_dir",), text)


def validate_with_spec(recipe: Recipe, spec: ModelSpec) -> None:
    """Refuse a recipe that does not fit this model. Raises UserError with all problems together.

    An FP8 KV cache is allowed for Qwen2.5: its K stays BF16 and its V is FP8 (fp8/policy.py; `check` prints it).
    """
    texts = [problem.text for problem in spec_problems(recipe, spec)]
    if texts:
        raise UserError(texts[0] if len(texts) == 1 else "\n  ".join([f"{len(texts)} problems", *texts]))


def _and_lengths(recipe: Recipe, positions: int) -> str:
    """What else has to be lower if prompt and answer exceed the model's positions."""
    prompt, answer = recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens
    if prompt + answer <= positions:
        return ""
    lower = positions - answer if answer < positions else positions // 2
    also = f" and rollout.max_new_tokens to {positions - lower}" if answer >= positions else ""
    return f", and rollout.max_prompt_tokens (now {prompt}), for example to {lower}{also}"


def spec_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Yield the problems that depend on the model's shape."""
    fp8 = recipe.fp8
    if recipe.model.context_length == spec.max_positions:
        yield from _length_problems(recipe, spec.max_positions)
    elif recipe.model.context_length > spec.max_positions:
        text = (
            f"model.context_length: {recipe.model.context_length} exceeds the model's {spec.max_positions}"
            f" positions; lower it to {spec.max_positions}{_and_lengths(recipe, spec.max_positions)}"
        )
        yield Problem(("model.context_length",), text)
    lora = recipe.model.lora
    unknown = unknown_target(lora.targets, spec) if lora is not None and lora.targets is not None else None
    if unknown is not None:
        yield Problem(("model.lora.targets",), f"model.lora.targets: {unknown}")
    checkpointed = recipe.trainer.checkpointed_layers
    if checkpointed is not None and checkpointed > spec.num_layers:
        text = (
            f"trainer.checkpointed_layers: {checkpointed} are more than the model's {spec.num_layers} layers;"
            f" give 0 to {spec.num_layers}, or leave it out for all"
        )
        yield Problem(("trainer.checkpointed_layers",), text)
    yield from expert_problems(recipe, spec)
    yield from chain(tensor_problems(recipe, spec), backend_spec_problems(recipe, spec))
    if lora is not None and unknown is None and not adapter_elements(spec, lora):
        text = (
            f"model.lora.targets: {', '.join(targets_of(lora, spec))} exist only in experts; set"
            f" model.lora.experts=true, or add one of {', '.join(projections(spec))}"
        )
        yield Problem(("model.lora.targets",), text)
    if not (fp8.rollout or fp8.train):
        return
    for name, size in spec.linear_sizes().items():
        if size % 16:
            text = f"fp8: linears need sizes divisible by 16, but this model's {name} is {size}; use precision: bf16"
            yield Problem(("fp8.rollout", "fp8.train"), text)
    kept = fp8.bf16_first_layers + fp8.bf16_last_layers
    if kept >= spec.num_layers:
        text = (
            f"fp8.bf16_first_layers + bf16_last_layers: {kept} of the model's {spec.num_layers} layers leave no layer"
            f" in FP8; lower them, or use precision: bf16"
        )
        yield Problem(("fp8.bf16_first_layers", "fp8.bf16_last_layers"), text)
