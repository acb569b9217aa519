"""Refuse settings that would have no effect, where nobody would notice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from octetrl.config.schema import OptimizerConfig, Recipe
from octetrl.config.section import Problem


def settings_without_effect(recipe: Recipe) -> Iterator[Problem]:
    trainer, checkpoint, evaluation = recipe.trainer, recipe.checkpoint, recipe.evaluation
    if checkpoint.batches_ahead == "saved" and not recipe.cluster.max_staleness:
        text = (
            "checkpoint.batches_ahead: saved has no effect without batches that are generated ahead; give"
            " cluster.max_staleness=1 or more, or checkpoint.batches_ahead=drawn_again"
        )
        yield Problem(("checkpoint.batches_ahead", "cluster.max_staleness"), text)
    if trainer.checkpointed_layers is not None and trainer.activation_checkpointing == "none":
        text = (
            "trainer.checkpointed_layers: it has no effect with activation_checkpointing 'none'; choose 'attention' or"
            " 'layer', or leave it out"
        )
        yield Problem(("trainer.checkpointed_layers", "trainer.activation_checkpointing"), text)
    if recipe.data.sources and recipe.algorithm.learns_from == "rollouts":
        text = (
            f"data.sources: {recipe.algorithm.name} learns from rollouts and reads no rows, so it has no effect; remove"
            " it, or use sft or dpo"
        )
        yield Problem(("data.sources", "algorithm.name"), text)
    if checkpoint.keep_best and checkpoint.best_metric.startswith("eval/") and evaluation.every and checkpoint.every:
        first = math.lcm(evaluation.every, checkpoint.every)
        if max(evaluation.every, checkpoint.every) <= recipe.steps < first:  # a shorter run is a trial
            text = (
                f"checkpoint.keep_best: no checkpoint before the last has '{checkpoint.best_metric}': the first step"
                f" with both a checkpoint and an evaluation is {first}, of {recipe.steps}; make checkpoint.every"
                f" ({checkpoint.every}) a multiple of evaluation.every ({evaluation.every})"
            )
            yield Problem(("checkpoint.keep_best", "checkpoint.every", "evaluation.every", "steps"), text)


def decay_without_effect(section: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    if optimizer.weight_decay_on != "linears" and optimizer.weight_decay == 0:
        text = (
            f"{section}.weight_decay_on: '{optimizer.weight_decay_on}' has no effect while {section}.weight_decay is 0;"
            f" set that to 0.01, or leave this out"
        )
        yield Problem((f"{section}.weight_decay_on", f"{section}.weight_decay"), text)
