"""Workers that only train or only generate: what a recipe's problems and the first lines say of them."""

from __future__ import annotations

import pytest

from octetrl.config.cluster import local_lack
from octetrl.config.in_words import describe_roles
from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from tests.unit.config.test_validate import problem_of


def test_a_wrong_number_of_one_role_is_one_problem() -> None:
    message = problem_of(("cluster.trainer_cpus", 0), ("cluster.engine_cpus", 1))
    assert message == "recipe: cluster.trainer_cpus: 0 is out of range; it must be at least 1"


@pytest.mark.parametrize(
    ("has", "fewer"),
    [(0, "use cluster.trainer_cpus=2 cluster.engine_cpus=1 instead, remove them"), (2, "lower them")],
)
def test_too_few_gpus_for_roles_name_the_given_fields(has: int, fewer: str) -> None:
    lack = local_lack(ClusterConfig(trainer_gpus=2, engine_gpus=1), has)
    needs = f"cluster.trainer_gpus: 2 with engine_gpus: 1: 3 GPUs were asked for, this machine has {has}; {fewer}, or"
    assert lack == f"{needs} give the cluster.address of a Ray cluster that has them"
    alone = local_lack(ClusterConfig(gpus=2), 0)
    assert alone is not None and alone.startswith("cluster.gpus: 2 GPUs were asked for")


@pytest.mark.parametrize(
    ("trainers", "engines", "said"),
    [
        (1, 1, "worker 0 trains, worker 1 generates"),
        (2, 3, "workers 0 and 1 train, workers 2 to 4 generate"),
        (3, 2, "workers 0 to 2 train, workers 3 and 4 generate"),
    ],
)
def test_roles_by_number_of_worker(trainers: int, engines: int, said: str) -> None:
    cluster = ClusterConfig(trainer_cpus=trainers, engine_cpus=engines, max_staleness=2)
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), cluster=cluster)
    assert describe_roles(recipe) == f"{said}; cluster.max_staleness: 2"
    assert describe_roles(recipe.model_copy(update={"cluster": ClusterConfig(cpus=2)})) is None
