"""Check that a step can learn from complete groups while its last answers are sampled (`rollout.learn_beside_tail`)."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.algorithm import DistillConfig, PpoConfig, ReinforcePpBaselineConfig, ReinforcePpConfig
from octetrl.config.objective_settings import CorrectionSettings, KlSettings
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem

FIELD = "rollout.learn_beside_tail"
TAIL_SHARE = 0.25  # of a worker's `engine.max_batch`: so few unfinished answers of all workers continue on one
OFF = f"or {FIELD}: false"


def describe_tail(recipe: Recipe) -> str | None:
    """When a step begins to learn beside its tail. None without it."""
    if not recipe.rollout.learn_beside_tail:
        return None
    return (
        f"when at most {max(1, int(recipe.engine.max_batch * TAIL_SHARE))} answers of all workers are unfinished"
        f" ({TAIL_SHARE:g} of engine.max_batch), one worker samples them to the end and the others train on complete"
        " groups"
    )


def tail_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what needs the whole batch, or another order of work."""
    if not recipe.rollout.learn_beside_tail:
        return
    cluster, trainer = recipe.cluster, recipe.trainer
    if cluster.num_workers == 1:
        text = (
            f"{FIELD}: one worker samples and trains in turns, which takes the time of both (docs/log.md, 'Learning"
            " beside the tail'); give cluster.gpus or cluster.cpus of 2 or more, or set it to false"
        )
        yield Problem((FIELD, "cluster.gpus", "cluster.cpus"), text)
    kind = "cpus" if cluster.on_cpus else "gpus"
    roles = (f"cluster.trainer_{kind}", f"cluster.engine_{kind}")
    rules = (
        (cluster.roles is not None, roles, f"workers that generate do not train; use cluster.{kind},"),
        (
            cluster.tensor_parallel > 1,
            ("cluster.tensor_parallel",),
            "workers that share a model run the same forwards; set it to 1,",
        ),
        (
            cluster.gradients == "sharded",
            ("cluster.gradients",),
            "sharded adds every micro-batch's gradient over all workers, and some still sample; use local,",
        ),
        (
            trainer.gradients != "float32",
            ("trainer.gradients",),
            "the sums are scaled when the denominator is known, which rounds BF16 sums once more; use float32,",
        ),
        (trainer.weight_codes == "remade", ("trainer.weight_codes",), "the engine needs its codes; use kept,"),
        (
            trainer.minibatches > 1,
            ("trainer.minibatches",),
            "several updates a step need their samples in order; set it to 1,",
        ),
        (trainer.epochs > 1, ("trainer.epochs",), "only the first of several passes could begin early; set it to 1,"),
        (
            trainer.router.balance_loss > 0 or trainer.router.z_loss > 0,
            ("trainer.router.balance_loss", "trainer.router.z_loss"),
            "the routers' losses are means over all micro-batches of the step; set both to 0,",
        ),
        (recipe.engine.backend != "octetrl", ("engine.backend",), "its answers cannot move; use octetrl,"),
        (
            any(one.reward_model is not None for one in recipe.each_environment.values()),
            ("environment.reward_model",),
            "it scores all answers when the last has ended; use a reward function or a judge,",
        ),
    )
    for is_wrong, fields, text in rules:
        if is_wrong:
            yield Problem((*fields, FIELD), f"{FIELD}: {fields[0]}: {text} {OFF}")
    yield from _objective_problems(recipe)


def _objective_problems(recipe: Recipe) -> Iterator[Problem]:
    """Objectives whose loss needs something of the whole batch before the first backward."""
    algorithm = recipe.algorithm
    if algorithm.learns_from != "rollouts":
        yield Problem((FIELD, "algorithm.name"), f"{FIELD}: {algorithm.name} samples no rollouts; set it to false")
        return
    batch_wide = {
        "reinforce_pp": "normalises advantages over the whole batch",
        "reinforce_pp_baseline": "normalises advantages over the whole batch",
        "ppo": "needs the critic's values of the whole batch",
    }
    if isinstance(algorithm, ReinforcePpConfig | ReinforcePpBaselineConfig | PpoConfig):
        text = f"{FIELD}: {algorithm.name} {batch_wide[algorithm.name]}; use grpo, rloo, gspo, cispo or dapo, {OFF}"
        yield Problem((FIELD, "algorithm.name"), text)
    elif isinstance(algorithm, KlSettings) and algorithm.keeps_reference and algorithm.kl_in != "loss":
        text = (
            f"{FIELD}: algorithm.kl_in: {algorithm.kl_in} computes advantages from the KL of the whole batch; use loss,"
        )
        yield Problem((FIELD, "algorithm.kl_in"), f"{text} {OFF}")
    if isinstance(algorithm, DistillConfig) and algorithm.distillation == "sampled":
        text = f"{FIELD}: algorithm.distillation: sampled computes the advantages of the whole batch; use reverse_kl"
        yield Problem((FIELD, "algorithm.distillation"), f"{text} or forward_kl, {OFF}")
    if isinstance(algorithm, CorrectionSettings):
        if "self_normalize" in algorithm.corrections:
            text = f"{FIELD}: algorithm.corrections: self_normalize divides by a mean over the whole batch; remove it,"
            yield Problem((FIELD, "algorithm.corrections"), f"{text} {OFF}")
        if algorithm.masked_tokens == "left_out":
            text = f"{FIELD}: algorithm.masked_tokens: left_out counts the tokens of the whole batch; use"
            yield Problem((FIELD, "algorithm.masked_tokens"), f"{text} in_denominator, {OFF}")
