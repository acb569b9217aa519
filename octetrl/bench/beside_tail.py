"""A step of `octetrl bench step` that learns beside the tail of its rollout (`rollout.learn_beside_tail`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octetrl.algorithms.table import Algorithm
from octetrl.bench.step import rollout_groups
from octetrl.config.schema import Recipe
from octetrl.records import Completion, GenerationRequest, PolicyUpdate, RolloutGroup
from octetrl.rollout.backend import SessionRecord
from octetrl.run.beside_tail import Blocks, divisor, groups_per_block
from octetrl.workers.many.tail import TailWorkers


@dataclass(frozen=True, slots=True)
class TailStep:
    """What one step sampled and learnt."""

    completions: list[list[Completion]]
    update: PolicyUpdate
    produced: float  # when the last answer had ended, by the caller's clock
    micro_batches: int
    trained_tokens: int
    rollout: SessionRecord


def tail_step(
    workers: TailWorkers,
    recipe: Recipe,
    requests: Sequence[GenerationRequest],
    algorithm: Algorithm,
    reward_seed: str,
    now: Callable[[], float],
) -> TailStep:
    """Samples `requests` and makes one update. Rewards are random. Siblings of a group stand side by side,
    in one request or in several."""
    group_size = recipe.rollout.group_size
    per_group = group_size // requests[0].num_siblings  # requests
    blocks = Blocks(groups_per_block(recipe), workers.layout, algorithm)
    drawn: dict[int, dict[int, Completion]] = {index: {} for index in range(len(requests))}
    groups: dict[int, RolloutGroup] = {}

    def on_completions(ended: Sequence[tuple[int, int, Completion]]) -> None:
        for index, sibling, completion in ended:
            drawn[index][sibling] = completion
            place = index // per_group
            own = range(place * per_group, (place + 1) * per_group)
            if all(len(drawn[one]) == requests[one].num_siblings for one in own):
                answers = [[completion for _, completion in sorted(drawn[one].items())] for one in own]
                rng = random.Random(f"{reward_seed} {place}")
                (groups[place],) = rollout_groups([requests[one] for one in own], answers, group_size, rng)
                batch = blocks.add(place, groups[place])
                if batch is not None:
                    workers.offer(batch)

    workers.begin_step(divisor(recipe))
    records: list[SessionRecord] = []
    completions = workers.generate(requests, on_completions, records.append)
    produced = now()
    for batch in blocks.rest([group for _, group in sorted(groups.items())]):
        workers.offer(batch)
    update, counts = workers.finish_step(), blocks.metrics
    micro_batches, tokens = int(counts["train/micro_batches"]), int(counts["train/trained_tokens"])
    return TailStep(completions, update, produced, micro_batches, tokens, records[0])
