"""Draws a few answers by a recipe and scores them, without training: `octetrl check --sample N`."""

from __future__ import annotations

from dataclasses import replace

from octetrl.config.schema import Recipe
from octetrl.records import RolloutGroup
from octetrl.rollout.collect import collect_groups
from octetrl.rollout.collected import Collecting
from octetrl.run.build import build_run


def sample_answers(recipe: Recipe, number: int) -> list[RolloutGroup]:
    """One rollout of each of the first `number` training tasks, with the recipe's sampling. Writes nothing."""
    quiet = recipe.model_copy(update={"logging": recipe.logging.model_copy(update={"console": "quiet"})})
    run = build_run(quiet, trains=False)
    try:
        tasks = run.taskset.next_batch(number)
        if run.workers.needs_calibration:
            limit = recipe.rollout.max_prompt_tokens
            chat = run.collection.chat
            run.workers.calibrate([chat.of(task).first_prompt_tokens(task.prompt, limit) for task in tasks])
        one_each = replace(run.collection.at_step(1), group_size=1)
        return collect_groups(tasks, run.rewards, run.workers, one_each, Collecting())
    finally:
        run.close()
