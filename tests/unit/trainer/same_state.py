"""Updates of several workers against those of one, each of them from the state that the one worker had before it.

From one state only the order of float32 sums differs, so every difference below has a bound that follows from it. A
run that goes on from its own weights has no such bound: here and there a weight is rounded to another code, and how far
a later loss is from the other run's depends on which codes these are, and so on the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from octetrl.records import PolicyUpdate
from octetrl.trainer.prepared import TrainerState
from octetrl.trainer.scalar_trainer import ScalarState, ScalarTrainer
from octetrl.trainer.sharded_state import OwnedState, own_optimizer, own_weights
from octetrl.trainer.trainer import Trainer

State = TypeVar("State", TrainerState, ScalarState)

# The most that was measured, with the processor's features limited in five ways (setup/processors.sh): loss 1.2e-7,
# gradient norm 6.6e-7, gradients 8.2e-7 of a tensor's largest value, master weights 3e-4 of the learning rate, and 2 of
# 57,000 to 136,000 codes.
LOSS, NORM, GRADIENT, MASTER, CODES = 1e-6, 5e-6, 5e-6, 3e-3, 10


class Step(NamedTuple):
    before: TrainerState  # copies
    update: PolicyUpdate
    gradients: dict[str, Tensor]  # owned rows, clipped
    masters: dict[str, Tensor]  # owned rows
    rounded: dict[str, Tensor]  # what the forward multiplies: codes of FP8 linears, and the other weights


def copy_of(state: State) -> State:
    weights, optimizer = (
        {name: one.clone() for name, one in part.items()} for part in (state.weights, state.optimizer)
    )
    return replace(state, weights=weights, optimizer=optimizer)


def owned_part(whole: State, own: State, trainer: Trainer | ScalarTrainer) -> State:
    """The rows of one worker's state that the worker of `trainer` owns. own: its state now."""
    part = OwnedState(own.weights, own.optimizer, trainer.optimizer.slots, trainer.peers.share)
    return replace(whole, weights=own_weights(whole.weights, part), optimizer=own_optimizer(whole.optimizer, part))


def step_of(trainer: Trainer, before: TrainerState, update: PolicyUpdate) -> Step:
    slots = trainer.optimizer.slots
    named = trainer.model.named_parameters()
    rounded = {name: one.detach().clone() for name, one in named if one.untyped_storage().nbytes()}
    rounded |= {name: linear.codes.clone() for name, linear in trainer.model.float8_linears()}
    masters = {slot.name: slot.master.clone() for slot in slots if slot.master is not None}
    return Step(before, update, {slot.name: slot.gradient.clone() for slot in slots}, masters, rounded)


def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The owned rows of all workers, by name."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def assert_one_update(alone: Step, team: Sequence[Step], lr: float) -> None:
    """Loss, gradients, masters and codes of the team are equal to the one worker's up to the order of float32 sums."""
    for one in team:
        assert one.update.metrics.keys() == alone.update.metrics.keys()
        assert one.update.metrics["loss"] == pytest.approx(alone.update.metrics["loss"], rel=LOSS)
        assert one.update.metrics["grad_norm"] == pytest.approx(alone.update.metrics["grad_norm"], rel=NORM)
    gradients, masters = joined(one.gradients for one in team), joined(one.masters for one in team)
    assert gradients.keys() == alone.gradients.keys() and masters.keys() == alone.masters.keys()
    for name, whole in alone.gradients.items():
        torch.testing.assert_close(gradients[name], whole, rtol=0, atol=GRADIENT * float(whole.abs().max()), msg=name)
    for name, whole in alone.masters.items():
        torch.testing.assert_close(masters[name], whole, rtol=0, atol=MASTER * lr, msg=name)
    assert_few_neighbours(team[0].rounded, alone.rounded)


def assert_few_neighbours(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Values of `expected` in float32 are not compared: they are the masters. `found` may lack some of its names."""
    differing = 0
    for name in found.keys() & expected.keys():
        if expected[name].dtype != torch.float32:
            steps = (order(found[name]) - order(expected[name])).abs()
            assert steps.max() <= 1, f"{name}: a code {int(steps.max())} codes away"
            differing += int(steps.count_nonzero())
    assert differing <= CODES, f"{differing} codes differ"


def order(values: Tensor) -> Tensor:
    """The place of each BF16 or E4M3 value among all values, zero's being 0."""
    bits = values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int8).int()
    largest = torch.iinfo(torch.int16 if values.dtype == torch.bfloat16 else torch.int8).max
    return torch.where(bits < 0, -(bits & largest), bits)
