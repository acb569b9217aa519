"""What settings mean for a run: roles of workers, the tail of a step, settings that are not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.config.in_words import describe_roles, describe_tail, local_lack, without_effect
from octetrl.config.rules_environment import refuse_for_turns
from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from octetrl.config.validate import build_recipe
from octetrl.system.errors import UserError
from tests.e2e.tiny_run import tiny_recipe
from tests.unit.config.test_validate import SERVER, plain_tree

TAIL = {"rollout.learn_beside_tail": True, "cluster.cpus": 2, "cluster.device": "auto", "engine.max_batch": 64}


@pytest.mark.parametrize(("has", "fewer"), [(0, "cluster.trainer_cpus=2 cluster.engine_cpus=1"), (2, "lower them")])
def test_too_few_gpus_for_roles_name_the_given_fields(has: int, fewer: str) -> None:
    lack = str(local_lack(ClusterConfig(trainer_gpus=2, engine_gpus=1), has))
    assert lack.startswith("cluster.trainer_gpus: 2 with engine_gpus: 1: ") and fewer in lack
    assert str(local_lack(ClusterConfig(gpus=2), 0)).startswith("cluster.gpus: ")


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


@pytest.mark.parametrize("name", ["grpo", "dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo", "rft"])
def test_objectives_whose_advantages_need_their_group_alone_learn_beside_the_tail(name: str) -> None:
    recipe = tiny_recipe(Path("model"), Path("run"), TAIL | {"algorithm": {"name": name}})
    assert "at most 16 answers" in str(describe_tail(recipe))
    with pytest.raises(UserError, match=r"^rollout.learn_beside_tail: "):
        refuse_for_turns(recipe, has_agent=False)


def test_settings_that_a_server_does_not_read_are_named() -> None:
    given = (*SERVER, ("engine.max_batch", 8), ("engine.speculation.ngrams", [4]))
    recipe, _ = build_recipe(plain_tree(*given), training=False)
    assert recipe is not None
    assert str(without_effect(recipe)).startswith("engine.max_batch, engine.speculation.ngrams: no effect")
    plain, _ = build_recipe(plain_tree(("engine.max_batch", 8)))
    assert plain is not None and without_effect(plain) is None, "our engine reads it"
