"""`rollout.learn_beside_tail` refuses by name what it can't do, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.algorithm import DpoConfig, SftConfig
from octetrl.config.schema import Recipe
from octetrl.config.validate_environment import refuse_for_turns
from octetrl.config.validate_tail import describe_tail, tail_problems
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster.cpus": None}, "one worker samples and trains in turns, which takes the time of both"),
        ({"algorithm": {"name": "reinforce_pp"}}, "reinforce_pp normalises advantages over the whole batch"),
        ({"algorithm": {"name": "reinforce_pp_baseline"}}, "reinforce_pp_baseline normalises advantages"),
        ({"algorithm": {"name": "ppo"}}, "ppo needs the critic's values of the whole batch"),
        ({"algorithm": {"name": "grpo", "kl_coefficient": 0.1, "kl_in": "reward"}}, "kl_in: reward computes"),
        ({"algorithm": {"name": "grpo", "corrections": ["self_normalize"]}}, "self_normalize divides by a mean"),
        (
            {"algorithm": {"name": "grpo", "corrections": ["token_mask"], "masked_tokens": "left_out"}},
            "left_out counts the tokens of the whole batch",
        ),
        ({"algorithm": {"name": "distill", "teacher": "model"}}, "sampled computes the advantages of the whole batch"),
        ({"trainer.minibatches": 2}, "several updates a step need their samples in order"),
        ({"trainer.epochs": 2}, "only the first of several passes could begin early"),
        ({"trainer.gradients": "bfloat16"}, "rounds BF16 sums once more"),
        ({"trainer.router": {"z_loss": 0.1}}, "the routers' losses are means over all micro-batches"),
        ({"trainer.router": {"balance_loss": 0.1}}, "the routers' losses are means over all micro-batches"),
        ({"cluster.gradients": "sharded"}, "adds every micro-batch's gradient over all workers"),
        ({"cluster.cpus": 4, "cluster.tensor_parallel": 2}, "workers that share a model run the same forwards"),
        ({"trainer.weight_codes": "remade"}, "the engine needs its codes"),
        (
            {"environment.reward_model": "model", "environment.reward": None},
            "it scores all answers when the last has",
        ),
        (
            {"cluster.cpus": None, "cluster.trainer_cpus": 1, "cluster.engine_cpus": 1},
            "cluster.trainer_cpus: workers that generate do not train; use cluster.cpus, or",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_needs_the_whole_batch_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"rollout.learn_beside_tail: .*{says}"):
        recipe(**changes)
    assert recipe(**changes, **{"rollout.learn_beside_tail": False})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trainer": {"weight_codes": "remade"}}, "trainer.weight_codes: the engine needs its codes; use kept"),
        ({"engine": {"backend": "vllm"}}, "engine.backend: its answers cannot move; use octetrl"),
        ({"environment": {"reward_model": "scorer"}}, "environment.reward_model: it scores all answers when the last"),
        ({"algorithm": SftConfig()}, "sft samples no rollouts; set it to false"),
        ({"algorithm": DpoConfig()}, "dpo samples no rollouts; set it to false"),
    ],
    ids=["weight_codes", "backend", "reward_model", "sft", "dpo"],
)
def test_it_refuses_by_itself_what_several_workers_or_a_cpu_refuse_too(change: dict[str, Any], says: str) -> None:
    """Other rules name these fields as well, so the rules of this option are asked alone."""
    whole = recipe()
    assert not list(tail_problems(whole))
    for section, values in change.items():
        new = getattr(whole, section).model_copy(update=values) if isinstance(values, dict) else values
        (problem,) = tail_problems(whole.model_copy(update={section: new}))
    assert (
        problem.text.startswith(f"rollout.learn_beside_tail: {says}") and "rollout.learn_beside_tail" in problem.fields
    )
    assert problem.text.endswith("false")


def test_several_turns_are_refused_when_the_environment_is_known() -> None:
    with pytest.raises(UserError, match=r"learn_beside_tail: it needs answers of one turn, but .* has several; set it"):
        refuse_for_turns(recipe())
    refuse_for_turns(recipe(**{"rollout.learn_beside_tail": False}))
