"""Blocks of groups: packed when they are complete, and the same whatever the order in which groups end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octetrl.algorithms.table import build_algorithm
from octetrl.config.algorithm import GrpoConfig
from octetrl.records import Completion, FinishReason, PackedBatch, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.rollout.samples import to_samples, trained_rollouts
from octetrl.run.beside_tail import Blocks, divisor, groups_per_block
from octetrl.trainer.packing import PackingLayout, pack
from tests.e2e.tiny_run import tiny_recipe

OBJECTIVE, LAYOUT = build_algorithm(GrpoConfig()), PackingLayout(tokens_per_micro_batch=64)


def group(place: int) -> RolloutGroup:
    rng, task = random.Random(place), Task(str(place), "")

    def rollout() -> Rollout:
        count = rng.randint(1, 30)
        answer = Completion((place + 2,) * count, (-0.5,) * count, "", FinishReason.STOP, 0, "digest")
        reward = 1.0 if place == 4 else rng.random()  # group 4 teaches nothing, and is left out
        return Rollout(task, (Turn((1, 1), answer),), RolloutStatus.SCORED, reward)

    return RolloutGroup(task, tuple(rollout() for _ in range(3)))


GROUPS = [group(place) for place in range(11)]


def packed(order: list[int]) -> tuple[dict[tuple[int, ...], float], Blocks]:
    """The micro-batches by their tokens, with their block's denominator. Groups end in `order`, the rest afterwards."""
    blocks, found = Blocks(3, LAYOUT, OBJECTIVE), list[PackedBatch]()
    for count, place in enumerate(order, start=1):
        batch = blocks.add(place, GROUPS[place])
        done = {one for one in range(3) if {3 * one, 3 * one + 1, 3 * one + 2} <= set(order[:count])}
        assert (batch is not None) == (place // 3 in done and place // 3 < 3)
        found += [] if batch is None else [batch]
    found += blocks.rest(GROUPS)
    parts = {
        tuple(one.token_ids_T.tolist()): batch.loss_denominators[0] for batch in found for one in batch.minibatches[0]
    }
    return parts, blocks


def test_micro_batches_do_not_depend_on_the_order_in_which_groups_end() -> None:
    whole = pack(to_samples([one for one in GROUPS if OBJECTIVE.keeps(one)], OBJECTIVE), LAYOUT, "token")
    expected, blocks = packed([])
    for seed in range(5):
        order = random.Random(seed).sample(range(11), k=8)
        parts, blocks = packed(order)
        assert parts == expected
        for name in ("train/samples", "train/tokens", "train/trained_tokens"):
            assert blocks.metrics[name] == whole.metrics[name], name
        assert blocks.metrics["train/micro_batches"] == len(parts)
        assert 0.0 < blocks.metrics["train/packing_efficiency"] <= 1.0
    kept = [one for one in GROUPS if OBJECTIVE.keeps(one)]
    advantages = {id(one.rollout): one.advantage for one in trained_rollouts(kept, OBJECTIVE)}
    assert {id(one.rollout): one.advantage for one in blocks.trained(GROUPS)} == advantages
    trained = sorted(token for tokens in expected for token in tokens if token > 1)
    assert trained == sorted(token for one in whole.minibatches[0] for token in one.token_ids_T.tolist() if token > 1)
    assert 6 not in trained  # of group 4


@pytest.mark.parametrize(
    ("prompts", "tokens", "expected"), [(64, 16_384, 8), (64, 100, 4), (64, 20, 1), (6, 16_384, 1), (16, 16_384, 2)]
)
def test_a_block_fills_some_micro_batches_and_a_step_has_several(prompts: int, tokens: int, expected: int) -> None:
    changes = {"rollout.prompts_per_step": prompts, "trainer.tokens_per_micro_batch": tokens}
    recipe = tiny_recipe(
        Path("model"), Path("run"), changes | {"rollout.max_new_tokens": 48, "model.context_length": 200}
    )
    assert groups_per_block(recipe) == expected
    assert divisor(recipe) == prompts * 4 * 12  # weights by token, a quarter of the limit
