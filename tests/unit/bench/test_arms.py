"""An arm is a recipe with a list of overrides, and the sizes of the bench's workload."""

from __future__ import annotations

import pytest

from octetrl.bench.arms import Words, make_arm, with_layers, words_of_arms
from octetrl.bench.workload import workload_of
from octetrl.config.load import load_recipe
from octetrl.system.errors import UserError


@pytest.mark.parametrize(
    ("fields", "whole", "words"),
    [
        ([], [], [()]),
        (["precision=bf16,fp8_full"], [], [("precision=bf16",), ("precision=fp8_full",)]),
        (["a=1,2", "b=x,y"], [], [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]),
        (["a={b: 1, c: [2, 3]},null"], [], [("a={b: 1, c: [2, 3]}",), ("a=null",)]),
        (
            ["a=1,2"],
            ["b=1 c='x y'", "d=2"],
            [("b=1", "c=x y", "a=1"), ("b=1", "c=x y", "a=2"), ("d=2", "a=1"), ("d=2", "a=2")],
        ),
    ],
)
def test_options_become_lists_of_overrides(fields: list[str], whole: list[str], words: list[Words]) -> None:
    assert words_of_arms(fields, whole) == words


@pytest.mark.parametrize("option", ["precision", "=1", "a=", "a=1,,2", "a=1,1"])
def test_what_is_no_arm_is_refused(option: str) -> None:
    with pytest.raises(UserError, match="--arms"):
        words_of_arms([option])


def test_an_arms_recipe_has_the_workloads_sizes_and_writes_nothing() -> None:
    recipe = load_recipe("bench_tiny", ["engine.max_batch=6", "rollout.stop=[a]", "evaluation.every=1"])
    spec = with_layers(recipe, 1)
    workload = workload_of(recipe, "8x5+3-9", None, spec.max_positions)
    arm = make_arm("step", ("precision=bf16", "seed=2"), recipe, spec, workload, steps=3)
    rollout = arm.recipe.rollout
    assert (rollout.prompts_per_step, rollout.group_size) == (2, 4)
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (5, max(answer for _, answer in workload.siblings))
    assert arm.recipe.engine.max_batch == 6 and rollout.stop == () and arm.recipe.evaluation.every == 0
    assert (arm.untimed, arm.recipe.steps, arm.name, arm.spec.num_layers) == (2, 5, "seed=2", 1)
    few = workload_of(recipe, "4x5+9", None, spec.max_positions)
    assert make_arm("rollout", (), recipe, spec, few, steps=1).recipe.engine.max_batch == 4, "one place an answer"


def test_an_arm_that_generates_ahead_fills_its_pipeline_first() -> None:
    ahead = ["cluster.trainer_cpus=1", "cluster.engine_cpus=1", "cluster.max_staleness=2"]
    recipe = load_recipe("bench_tiny", ahead)
    spec = with_layers(recipe, None)
    arm = make_arm("step", (), recipe, spec, workload_of(recipe, None, None, spec.max_positions), steps=3)
    assert (arm.untimed, arm.recipe.steps) == (4, 9), "batches behind the last timed step are begun"


def test_what_a_bench_cannot_run_is_refused() -> None:
    recipe = load_recipe("bench_tiny")
    with pytest.raises(UserError, match="--layers"):
        with_layers(recipe, 99)
    sft = load_recipe("demo_sft")
    with pytest.raises(UserError, match=r"algorithm\.name"):
        make_arm("step", (), sft, with_layers(recipe, 1), workload_of(recipe, None, None, 200), steps=1)
