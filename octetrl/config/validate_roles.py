"""What workers that only train or only generate cannot do (`cluster.trainer_gpus`, `cluster.engine_gpus`)."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.algorithm import DistillConfig, RftConfig
from octetrl.config.cluster import ROLE_FIELDS
from octetrl.config.objective_settings import CorrectionSettings
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem


def describe_roles(recipe: Recipe) -> str | None:
    """Which workers train and which generate, and how far ahead. None if every worker does both."""
    cluster = recipe.cluster
    if cluster.roles is None:
        return None
    trainers, engines = cluster.roles
    train, generate = _workers(0, trainers, "train"), _workers(trainers, engines, "generate")
    return f"{train}, {generate}; cluster.max_staleness: {cluster.max_staleness}"


def _workers(first: int, count: int, do: str) -> str:
    if count == 1:
        return f"worker {first} {do}s"
    return f"workers {first} {'and' if count == 2 else 'to'} {first + count - 1} {do}"


def role_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what of the recipe does not go with `cluster.roles`."""
    algorithm = recipe.algorithm
    if recipe.cluster.roles is None:
        return
    if algorithm.learns_from != "rollouts":
        text = (
            f"cluster.{_first_role(recipe)}: {algorithm.name} samples no rollouts, so no worker would only generate;"
            " use cluster.gpus or cluster.cpus"
        )
        yield Problem((*ROLE_FIELDS, "algorithm.name"), text)
    elif recipe.cluster.max_staleness:
        yield from _stale_problems(recipe)


def _stale_problems(recipe: Recipe) -> Iterator[Problem]:
    """Objectives without a ratio to the log-probs of drawing learn stale answers as if the policy had given them."""
    algorithm = recipe.algorithm
    if isinstance(algorithm, RftConfig) or (
        isinstance(algorithm, DistillConfig) and algorithm.distillation != "sampled"
    ):
        what: str = algorithm.name
        if isinstance(algorithm, DistillConfig):
            what = f"{what} with algorithm.distillation: {algorithm.distillation}"
        text = (
            f"cluster.max_staleness: {recipe.cluster.max_staleness}, but {what} compares no token with the policy that"
            " sampled it, so stale answers would not be corrected; use 0, or another objective"
        )
        yield Problem(("cluster.max_staleness", "algorithm.name"), text)
        return
    assert isinstance(algorithm, CorrectionSettings), f"{algorithm.name} has no ratio"
    several = recipe.trainer.epochs * recipe.trainer.minibatches > 1
    corrects = {"tis", "sequence_tis"} & set(algorithm.corrections)
    base_is_own = algorithm.ratio_base == "proximal" or (algorithm.ratio_base == "auto" and several)
    if base_is_own and not corrects:
        text = (
            "cluster.max_staleness: several updates of a step compare a token with the trainer's own log-probs, and"
            " algorithm.corrections has neither tis nor sequence_tis for stale tokens; add one, or use"
            " algorithm.ratio_base: generator"
        )
        yield Problem(("cluster.max_staleness", "algorithm.corrections", "algorithm.ratio_base"), text)


def _first_role(recipe: Recipe) -> str:
    return "trainer_gpus" if recipe.cluster.trainer_gpus is not None else "trainer_cpus"
