"""Rules of what is trained: model, precision, lengths, objective, optimizer, evaluation, checkpoints."""

from __future__ import annotations

import math
import re
from pathlib import Path

from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.objective_settings import MASKS, DatasetSettings
from octetrl.config.rules import Rule, together, value
from octetrl.config.schema import LEAST_TEMPERATURE, CriticConfig, Recipe
from octetrl.system.names import is_url

FILE_NAMES = (".jsonl", ".json", ".parquet")  # of files of rows, which have no splits
MOST_ROLLOUTS = 10_000_000  # per step; each rollout is a record in memory
OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:name
_ROWS = {
    "conversations": '{"prompt": ..., "answer": ...} or {"messages": [...]}',
    "preferences": '{"prompt": ..., "chosen": ..., "rejected": ...}',
}


def samples_rollouts(recipe: Recipe) -> bool:
    return recipe.algorithm.learns_from == "rollouts"


def reads_rows(recipe: Recipe) -> bool:
    return not samples_rollouts(recipe)


def _has_fp8(recipe: Recipe) -> bool:
    return recipe.fp8.rollout or recipe.fp8.train


def _is_too_long(recipe: Recipe) -> bool:
    """Whether a prompt and its answer can exceed the context, in rollouts or in evaluations."""
    draws = samples_rollouts(recipe) or recipe.draws_evaluations
    return draws and recipe.model.context_length < recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens


def _is_evaluated_too_long(recipe: Recipe) -> bool:
    return recipe.model.context_length < recipe.rollout.max_prompt_tokens + (recipe.evaluation.max_new_tokens or 0)


def _corrections(recipe: Recipe) -> tuple[str, ...]:
    return value(recipe, "algorithm.corrections") or ()


def _corrects_twice(recipe: Recipe) -> bool:
    named = _corrections(recipe)
    return len(set(named)) < len(named) or {"tis", "sequence_tis"} <= set(named)


def _corrects_nothing(recipe: Recipe) -> bool:
    useful = {"tis", "veto"} if value(recipe, "algorithm.veto_by") == "probability" else {"tis"}
    return bool(set(_corrections(recipe)) - useful)


def _has_shared_size(recipe: Recipe) -> bool:
    """Whether an environment has no group size of its own."""
    return not recipe.environments or any(one.group_size is None for one in recipe.environments.values())


def _samples(recipe: Recipe) -> int:
    """Number of a step's samples, which its optimizer steps share."""
    if isinstance(recipe.algorithm, DatasetSettings):
        return recipe.algorithm.batch_size
    return recipe.rollout.prompts_per_step * min(recipe.group_sizes)


GROUPS = (  # of one size: rollout.group_size, where something has that
    Rule(
        "?rollout.prompts_per_step ?rollout.group_size",
        f"{{}} prompts of {{r.rollout.group_size}} rollouts are too many for a step; at most {MOST_ROLLOUTS:,} fit",
        lambda r: _has_shared_size(r) and r.rollout.prompts_per_step * r.rollout.group_size > MOST_ROLLOUTS,
    ),
    Rule(
        "algorithm.best_of_group ?rollout.group_size",
        "{} is more than a group_size, {r.rollout.group_size}; lower it",
        lambda r: _has_shared_size(r) and value(r, "algorithm.best_of_group") > r.rollout.group_size,
    ),
    Rule(
        "?rollout.group_size ?algorithm.name",
        "with 1 answer to a prompt, {r.algorithm.name} has no siblings to compare; use at least 2, or algorithm.name:"
        " reinforce_pp",
        lambda r: (
            samples_rollouts(r) and r.algorithm.needs_siblings and _has_shared_size(r) and r.rollout.group_size == 1
        ),
    ),
)
LENGTHS = (
    Rule(
        "?model.context_length ?rollout.max_prompt_tokens ?rollout.max_new_tokens",
        "{} is shorter than rollout.max_prompt_tokens {r.rollout.max_prompt_tokens} + rollout.max_new_tokens"
        " {r.rollout.max_new_tokens}; lower these, or raise it if the model has more positions",
        _is_too_long,
    ),
    Rule(
        "evaluation.max_new_tokens ?model.context_length ?rollout.max_prompt_tokens",
        "{} and rollout.max_prompt_tokens {r.rollout.max_prompt_tokens} exceed model.context_length"
        " {r.model.context_length}; lower it, or raise model.context_length",
        _is_evaluated_too_long,
    ),
)
MODEL = (
    *together("model.path model.preset", "fp8.kv_cache_tensors fp8.kv_cache=none"),
    Rule(
        "?model.path ?model.preset",
        "give a path, of a Hugging Face folder, or a preset with init: random",
        lambda r: not r.model.path and not r.model.preset,
    ),
    Rule(
        "model.preset model.init=pretrained (model.path=null)", "'{}' has no weights; set init: random, or give a path"
    ),
    Rule(
        "model.tokenizer=null model.preset (model.path=null)", "a preset has none; give a Hugging Face tokenizer folder"
    ),
    Rule("model.lora.targets=[]", "is empty, so nothing would be trained; name projections, or set model.lora=null"),
    Rule(
        "model.lora.targets",
        "a projection is named twice; name each once",
        value_is=lambda targets: len(set(targets)) < len(targets),
    ),
    Rule(
        "model.dtype=float32 ?fp8.rollout ?fp8.train ?fp8.kv_cache",
        "float32 has no FP8 path; use bfloat16, or precision: bf16, which turns FP8 off",
        lambda r: _has_fp8(r) or r.fp8.kv_cache != "none",
    ),
    *together("fp8.emulate=false fp8.format=mxfp8"),
    Rule(
        "fp8.format=mxfp8 ?cluster.cpus ?cluster.gpus",
        "'{}' runs on one worker, because dgrad's codes are not exchanged; use one, or 'block'",
        lambda r: r.cluster.num_workers > 1,
    ),
    Rule("fp8.emulate=false cluster.device=cpu", "false needs FP8 tensor cores; leave it out, or use a GPU", _has_fp8),
    GROUPS[0],
    *LENGTHS,
)
OBJECTIVE = (
    Rule(
        "?algorithm.name",
        "'{}' is not module:name, such as my_losses:leaky; name a function of a module, or a shipped objective",
        lambda r: isinstance(r.algorithm, OwnObjectiveConfig) and not OBJECT.fullmatch(r.algorithm.name),
    ),
    *together(
        "algorithm.max_refills>0 algorithm.drop_zero_variance=false",
        *(f"algorithm.{name} algorithm.kl_coefficient=0.0" for name in ("kl_target", "reference_every", "kl_gradient")),
        "algorithm.kl_in=reward_before_baseline algorithm.kl_coefficient=0.0",
        "algorithm.kl_gradient algorithm.kl_in!=loss",
        "algorithm.overlong=mask algorithm.kl_in=reward_before_baseline",
        "rollout.history=template algorithm.kl_in=reward_before_baseline",
        "algorithm.token_weighting!=constant algorithm.rloo_ratio=sequence",
        "algorithm.kl_in=reward algorithm.rloo_ratio=sequence (algorithm.kl_coefficient>0)",
        "algorithm.conversations data.sources",
        "checkpoint.batches_ahead cluster.max_staleness=0",
    ),
    Rule(
        "algorithm.kl_in=reward_before_baseline ?algorithm.name",
        "'{}' needs a baseline of siblings, and {r.algorithm.name} has none; use reward or loss",
        lambda r: not r.algorithm.needs_siblings,
    ),
    Rule("?algorithm.corrections", "{} would weight a token twice; name each once, and only one tis", _corrects_twice),
    Rule(
        "?algorithm.corrections algorithm.ratio_base=generator",
        "{} have nothing to correct where the engine's log-probs are the policy's; use ratio_base: auto or proximal",
        _corrects_nothing,
    ),
    *(
        Rule(
            f"algorithm.{name}",
            "{} must include 1, where both sides agree, and not go below 0",
            value_is=lambda bounds: not 0 <= bounds[0] <= 1 <= bounds[1],
        )
        for name in ("token_mask_range", "sequence_mask_range", "geometric_mask_range")
    ),
    Rule(
        "algorithm.veto_by ?algorithm.corrections",
        "{} has no effect without veto in algorithm.corrections; add it, or leave this out",
        lambda r: "veto" not in _corrections(r),
    ),
    Rule(
        "algorithm.masked_tokens ?algorithm.corrections",
        f"{{}} has no effect without a mask in algorithm.corrections; add one of {', '.join(MASKS)}",
        lambda r: not set(MASKS) & set(_corrections(r)),
    ),
    Rule(
        "algorithm.teacher=null algorithm.name=distill", "missing; distill needs the Hugging Face folder of a teacher"
    ),
    Rule(
        "algorithm.conversations=null ?data.sources ?algorithm.name",
        lambda r: f"{r.algorithm.name} needs the path of a file of {_ROWS[r.algorithm.learns_from]}, or data.sources",
        lambda r: not r.data.sources,
    ),
    Rule(
        "fp8.kv_cache=calibrated ?algorithm.name",
        "'calibrated' has no data for calibration with {r.algorithm.name}, which samples no rollouts; use 'none' or"
        " 'dynamic' (precision: fp8_full means 'calibrated')",
        reads_rows,
    ),
    Rule("data.sources ?algorithm.name", "{r.algorithm.name} reads no rows; remove it, or use sft", samples_rollouts),
    *(
        Rule(
            f"data.{name} ?algorithm.name",
            "{r.algorithm.name} reads no rows; set environment." + name,
            samples_rollouts,
        )
        for name in ("eval_dataset", "eval_split", "eval_size")
    ),
    Rule("epochs ?algorithm.name", "{r.algorithm.name} reads no rows; set steps instead", samples_rollouts),
    *GROUPS[1:],
    *(
        Rule(
            f"{name}.temperature>0 {name}.temperature<{LEAST_TEMPERATURE}",
            "{} is too small for float32",
            samples_rollouts,
        )
        for name in ("rollout", "evaluation")
    ),
    Rule(
        "rollout.temperature=0.0 ?algorithm.name",
        "0 is greedy, and equal answers teach nothing; use 1",
        samples_rollouts,
    ),
    *(
        Rule(
            f"rollout.{name} ?algorithm.name",
            "{} changes the distribution, and the trainer's log-probs would not match; only evaluations take it",
            samples_rollouts,
        )
        for name in ("top_k", "top_p", "min_p")
    ),
    Rule(
        "?critic algorithm.name!=ppo",
        "{r.algorithm.name} has none; remove the section",
        lambda r: r.critic != CriticConfig(),
    ),
    Rule(
        "critic.pretrain_steps (algorithm.name=ppo) ?steps",
        "{} of {r.steps} steps leave no step for the policy; lower it, or raise steps",
        lambda r: r.critic.pretrain_steps >= r.steps,
    ),
)
TRAINING_MEMORY = together(
    "trainer.weight_codes=remade fp8.train=false",
    "trainer.weight_codes=remade model.lora (fp8.train=true) (algorithm.name!=ppo)",  # it has codes alone
    (
        "trainer.weight_codes=remade engine.release_for_training=false (fp8.train=true) (fp8.rollout=true)"
        " (cluster.device!=cpu) (algorithm.name!=reward_model)"  # captured graphs read the codes
    ),
    "trainer.gradients=bfloat16 model.dtype=float32",
    "trainer.gradients=bfloat16 cluster.tensor_parallel>1",
    "trainer.gradients=bfloat16 model.lora (algorithm.name!=ppo) (cluster.tensor_parallel=1)",  # saves next to nothing
    "trainer.checkpointed_layers trainer.activation_checkpointing=none",
)


def _first_ranked(recipe: Recipe) -> int:
    """The first step with both a checkpoint and an evaluation."""
    return math.lcm(recipe.evaluation.every, recipe.checkpoint.every)


def _ranks_nothing(recipe: Recipe) -> bool:
    """Whether no checkpoint before the last has its metric. A run that is shorter than both periods is a trial."""
    longest = max(recipe.evaluation.every, recipe.checkpoint.every)
    if recipe.epochs is not None or not recipe.checkpoint.best_metric.startswith("eval/"):
        return False  # of epochs build.py asks again, when it knows how many steps they are
    return longest <= recipe.steps < _first_ranked(recipe)


def _columns_differ(recipe: Recipe) -> bool:
    first, *others = recipe.sources.values()
    return any(source.columns != first.columns for source in others)


def _no_callback(recipe: Recipe) -> str | None:
    return next((name for name in recipe.callbacks if not OBJECT.fullmatch(name)), None)


RUN = (
    *(
        Rule(pattern, "{} must each be below 1", value_is=lambda betas: 1 in betas)
        for pattern in ("trainer.optimizer.betas", "critic.optimizer.betas (algorithm.name=ppo)")
    ),
    *together(
        "trainer.optimizer.weight_decay_on trainer.optimizer.weight_decay=0.0",
        "critic.optimizer.weight_decay_on critic.optimizer.weight_decay=0.0 (algorithm.name=ppo)",
        "trainer.optimizer.master=stochastic_rounding model.dtype=float32",
        "critic.optimizer.master=stochastic_rounding model.dtype=float32 (algorithm.name=ppo)",
        "evaluation.samples>1 evaluation.temperature=0.0",
    ),
    Rule(
        "trainer.minibatches ?rollout.prompts_per_step ?rollout.group_size ?algorithm.batch_size",
        lambda r: f"{r.trainer.minibatches} updates cannot share {_samples(r)} samples; use at most {_samples(r)}",
        lambda r: r.trainer.minibatches > _samples(r),
    ),
    Rule("rollout.stop", "an empty text would stop every answer at once; remove it", value_is=lambda stop: "" in stop),
    *(
        Rule(
            f"{field} ?environment.eval_size",
            f"there are no held-out tasks; raise environment.eval_size, or set this to {off}",
            lambda r: not r.holds_out_rows and not any(each.holds_out for each in r.each_environment.values()),
        )
        for field, off in (("evaluation.every>0", "0"), ("evaluation.on_start", "false"))
    ),
    Rule(
        "evaluation.k ?evaluation.samples",
        "{} cannot be estimated from {r.evaluation.samples} completions a task; raise evaluation.samples, or lower k",
        lambda r: max(r.evaluation.k) > r.evaluation.samples,
    ),
    Rule(
        "checkpoint.keep_best>0 ?checkpoint.best_metric evaluation.every=0",
        "'{r.checkpoint.best_metric}' is never measured, because evaluation.every is 0; set that, or keep_best: 0",
        lambda r: r.checkpoint.best_metric.startswith("eval/"),
    ),
    Rule(
        "checkpoint.store",
        "'{}' is no URL; give one of an object store, such as s3://bucket/runs/mine",
        value_is=lambda url: url is not None and not is_url(url),
    ),
    Rule(
        "early_stopping evaluation.every=0",
        "'{r.early_stopping.metric}' is never measured, because evaluation.every is 0; set that, or another metric",
        lambda r: r.early_stopping is not None and r.early_stopping.metric.startswith("eval/"),
    ),
    *together(*(f"data.eval_size>0 data.{name}" for name in ("eval_dataset", "eval_split"))),
    Rule(
        "data.eval_split ?data.eval_dataset",
        "each of data.eval_dataset has a split of its own; leave this out",
        lambda r: isinstance(r.data.eval_dataset, dict),
    ),
    Rule(
        "data.eval_split ?data.eval_dataset ?data.sources",
        "only a Hugging Face data set has splits (owner/name, or a folder); set data.eval_dataset or eval_size instead",
        lambda r: any(one.path.endswith(FILE_NAMES) for one in r.held_out_sources.values()),
    ),
    Rule(
        "data.eval_split ?data.sources (data.eval_dataset=null)",
        "'{}' is also the split that is trained on; give another split, or data.eval_dataset",
        lambda r: any(source.split == r.data.eval_split for source in r.sources.values()),
    ),
    Rule(
        "data.eval_dataset ?data.sources",
        "the sources have different columns; give {{name: {{path: ..., columns: ...}}}}",
        lambda r: isinstance(r.data.eval_dataset, str) and bool(r.sources) and _columns_differ(r),
    ),
    Rule(
        "epochs ?steps",
        "{} and steps both say how long the run is; leave one of them out",
        lambda r: "steps" in r.model_fields_set,
    ),
    Rule(
        "callbacks",
        lambda r: f"'{_no_callback(r)}' is not module:name, such as my_callbacks:Notify",
        lambda r: _no_callback(r) is not None,
    ),
    Rule(
        "?seed ?environment.seed",
        "seed and environment.seed must be from 0 to 2^63 - 1; choose others",
        lambda r: r.seed >= 2**63 or not all(0 <= each.seed < 2**63 for each in r.each_environment.values()),
    ),
    Rule("output_dir", "contains a NUL, so it is not a path; remove it", value_is=lambda folder: "\0" in folder),
    Rule(
        "output_dir",
        "'{}' is no folder of the run's; give one that the run writes, such as runs/first",
        value_is=lambda folder: not folder.strip() or (Path(folder).is_absolute() and not Path(folder).name),
    ),
)
RANKING = (
    Rule(
        "checkpoint.keep_best>0 checkpoint.every>0 evaluation.every>0 ?steps",
        lambda r: (
            f"no checkpoint before the last has '{r.checkpoint.best_metric}': the first step with both a checkpoint and"
            f" an evaluation is {_first_ranked(r)}, of {r.steps}; make checkpoint.every a multiple of evaluation.every"
        ),
        _ranks_nothing,
    ),
)
TRAINING = (*OBJECTIVE, *TRAINING_MEMORY, *RANKING)
