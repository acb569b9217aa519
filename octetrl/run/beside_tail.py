"""A step that learns from complete groups while its last answers are still sampled (`rollout.learn_beside_tail`).

    collect_batch  -> on_group: a scored group -> its block is complete -> samples -> micro-batches -> `offer`
    the rest       -> `finish_step` -> `publish`, as in run/step.py

A block holds the groups of neighbouring tasks. It is packed by itself as soon as all its groups are complete. The
micro-batches therefore follow from the recipe and the answers, and not from the order in which the answers ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from octetrl.algorithms.weighting import TokenWeighting
from octetrl.config.schema import Recipe
from octetrl.records import PackedBatch, RolloutGroup, joined
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.samples import CreditAssignment, TrainedRollout, samples_of, trained_rollouts
from octetrl.run.folder.journal import Journal
from octetrl.run.state import Run, StepMethod, StepResult
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.workers.tail import TailWorkers

EXPECTED_SHARE = (
    0.25  # of `rollout.max_new_tokens`: an answer's tokens, where the number of groups of a block is chosen
)
MICRO_BATCHES = 2  # of a block, with answers of that length
LEAST_BLOCKS = 8  # of a step: one long answer keeps its block from being trained on early


class Objective(CreditAssignment, Protocol):
    """What is needed of an algorithm (algorithms/table.py)."""

    @property
    def keeps(self) -> Callable[[RolloutGroup], bool]: ...
    @property
    def token_weighting(self) -> TokenWeighting: ...


class Blocks:
    """The groups of one step, in blocks of `groups_per_block` neighbours. Each is packed when it is complete."""

    def __init__(
        self,
        groups_per_block: int,
        layout: PackingLayout,
        objective: Objective,
        temperature: float = 1.0,
    ) -> None:
        self._size, self._layout, self._objective = groups_per_block, layout, objective
        self._temperature = temperature
        self._groups: dict[int, RolloutGroup] = {}
        self._packed: set[int] = set()  # blocks
        self._advantages: dict[tuple[int, int], float] = {}  # by place of the group and sibling
        self._counts: dict[str, float] = {}

    def add(self, place: int, group: RolloutGroup) -> PackedBatch | None:
        """A complete group at its place in the step. Returns its block, packed, if the block is complete now."""
        self._groups[place] = group
        block = place // self._size
        places = range(block * self._size, (block + 1) * self._size)
        return self._pack(block, places) if all(map(self._groups.__contains__, places)) else None

    def rest(self, groups: Sequence[RolloutGroup]) -> Iterator[PackedBatch]:
        """The blocks that `add` has not returned. `groups`: all of the step, in order."""
        self._groups = dict(enumerate(groups))
        for block in range(-(-len(groups) // self._size)):
            if block not in self._packed:
                yield self._pack(block, range(block * self._size, min((block + 1) * self._size, len(groups))))

    def trained(self, groups: Sequence[RolloutGroup]) -> list[TrainedRollout]:
        """The rollouts of the blocks that were packed, as they are in `groups`, all of the step in order."""
        return [
            TrainedRollout(groups[place].rollouts[sibling], advantage, place)
            for (place, sibling), advantage in self._advantages.items()
        ]

    def _pack(self, block: int, places: range) -> PackedBatch:
        kept = [self._groups[place] for place in places if self._objective.keeps(self._groups[place])]
        trained = trained_rollouts(kept, self._objective)
        at = {id(one): (place, n) for place in places for n, one in enumerate(self._groups[place].rollouts)}
        self._advantages |= {at[id(one.rollout)]: one.advantage for one in trained}
        samples = samples_of(trained, self._temperature)
        batch = pack(samples, self._layout, self._objective.token_weighting)
        self._packed.add(block)
        for name, value in batch.metrics.items():
            self._counts[name] = self._counts.get(name, 0.0) + value
        return batch

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `pack`, over all blocks."""
        capacity = self._counts.get("train/micro_batches", 0.0) * self._layout.tokens_per_micro_batch
        efficiency = self._counts.get("train/tokens", 0.0) / capacity if capacity else 0.0
        return {**self._counts, "train/packing_efficiency": efficiency}


class BesideTail(StepMethod):
    """With the same completions and log-probs as generating, then learning."""

    def __init__(self, workers: TailWorkers) -> None:
        self._workers = workers

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        workers, objective = self._workers, run.algorithm
        blocks = Blocks(groups_per_block(run.config), workers.layout, objective, run.collection.sampling.temperature)

        def on_group(place: int, group: RolloutGroup) -> None:
            batch = blocks.add(place, group)
            if batch is not None:
                workers.offer(batch)

        workers.begin_step(divisor(run.config), number)
        settings = run.collection.at_step(number)
        collected = collect_batch(
            run.taskset, objective.keeps, run.rewards, workers, settings, run.lengths, on_group=on_group
        )
        for batch in blocks.rest(collected.groups):
            workers.offer(batch)
        recorded = journal.record(number, collected.groups, blocks.trained(collected.groups))
        update = workers.finish_step()
        published = workers.publish(update.policy_version)
        metrics = joined(recorded, collected.metrics, blocks.metrics, update.metrics, published.metrics)
        return StepResult(metrics, collected.groups, reward_times=collected.reward_times)


def groups_per_block(recipe: Recipe) -> int:
    """As many as fill some micro-batches, but few enough that a step has several blocks."""
    expected = recipe.rollout.group_size * recipe.rollout.max_new_tokens * EXPECTED_SHARE
    filling = round(MICRO_BATCHES * recipe.trainer.tokens_per_micro_batch / expected)
    return max(1, min(filling, recipe.rollout.prompts_per_step // LEAST_BLOCKS))


def divisor(recipe: Recipe) -> float:
    """The loss's denominator where every answer is trained on; with weights by token, a number of its size. It is the
    same in every run of the recipe, so the roundings of a backward do not depend on the answers of other groups."""
    answers = recipe.rollout.prompts_per_step * recipe.rollout.group_size
    by_token = getattr(recipe.algorithm, "token_weighting", None) == "token"
    return answers * (recipe.rollout.max_new_tokens * EXPECTED_SHARE if by_token else 1.0)
