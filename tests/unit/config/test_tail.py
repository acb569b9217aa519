"""`rollout.learn_beside_tail` refuses by name what it can't do, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.in_words import describe_tail
from octetrl.config.rules_environment import refuse_for_turns
from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError
from tests.e2e.tiny_run import tiny_recipe

ON = {"rollout.learn_beside_tail": True, "cluster.cpus": 2, "cluster.device": "auto"}


def recipe(**changes: Any) -> Recipe:
    return tiny_recipe(Path("model"), Path("run"), ON | changes)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo", "rft"])
def test_objectives_whose_advantages_need_their_group_alone_stream(name: str) -> None:
    assert recipe(algorithm={"name": name}).rollout.learn_beside_tail


def test_a_run_says_when_it_learns_beside_the_tail() -> None:
    said = str(describe_tail(recipe(**{"engine.max_batch": 64})))
    assert "at most 16 answers" in said and "engine.max_batch" in said
    assert describe_tail(recipe(**{"rollout.learn_beside_tail": False})) is None


def test_a_kl_term_of_the_loss_streams() -> None:
    assert recipe(algorithm={"name": "grpo", "kl_coefficient": 0.1}).rollout.learn_beside_tail


def test_several_turns_are_refused_when_the_environment_is_known() -> None:
    with pytest.raises(UserError, match=r"learn_beside_tail: it needs answers of one turn, but .* has several; set it"):
        refuse_for_turns(recipe())
    refuse_for_turns(recipe(**{"rollout.learn_beside_tail": False}))
