"""PPO's critic: a value model of its own, with its own optimizer, trained beside the policy.

    before the first update on a batch   V_old of every trained token, without gradient; GAE makes advantages, returns
    after each update of the policy      one update on the same minibatch, by the clipped value loss
    `pretrain_steps`                     so many steps train the critic alone: advantages of a head that knows nothing
                                         teach the policy noise

V of a token is the scalar at the token before it: what the prefix promises, before the token is drawn. Tokens weigh and
divide as in the policy's loss, so that neither packing nor micro-batches change it.

It is not the policy's trunk with a second head: sharing one would save a model and its optimizer, but then the value
loss moves what the engine draws with, and the two gradients need a weight against each other.

N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import TokenLoss
from octetrl.algorithms.value_loss import value_loss
from octetrl.config.schema import CriticConfig, TrainerConfig
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import MicroBatch
from octetrl.trainer.non_finite import refuse_non_finite
from octetrl.trainer.scalar_trainer import ScalarPart, ScalarState, ScalarTrainer
from octetrl.trainer.schedule import learning_rate


class Critic:
    """Owned by the trainer. Micro-batches come on the device."""

    def __init__(
        self,
        model: ScalarDecoder,
        config: CriticConfig,
        trainer: TrainerConfig,
        *,
        total_steps: int,
        seed: int = 0,
        trains: bool = True,
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self.scalar_trainer = ScalarTrainer(model, trainer, config.optimizer, seed=seed, trains=trains)

    def is_pretraining(self, policy_version: int) -> bool:
        """Whether the step from this version trains the critic alone."""
        return policy_version < self.config.pretrain_steps

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V of each trained token, float32 [N]. NonFiniteError names the sample and position of one that is not."""
        values_N = self.scalar_trainer.scalars(micro_batch, micro_batch.predictor_N)
        refuse_non_finite("value", values_N, micro_batch.sequence_N, micro_batch.target_positions_N)
        return values_N

    def update(
        self,
        minibatch: Sequence[tuple[MicroBatch, Tensor, Tensor]],
        denominator: float,
        policy_version: int,
    ) -> dict[str, float]:
        """One optimizer step over (micro-batch, old values [N], returns [N]); returns its metrics."""
        parts = [
            ScalarPart(
                micro_batch,
                rows_R=micro_batch.predictor_N,
                loss=partial(self._loss, old_values_N=old_values_N, returns_N=returns_N),
                weights_I=micro_batch.weights_N,
            )
            for micro_batch, old_values_N, returns_N in minibatch
        ]
        lr = learning_rate(policy_version, self.config.optimizer, self.total_steps)
        metrics = self.scalar_trainer.update(parts, denominator, lr)
        own = {"value/loss": metrics.pop("loss"), "value/grad_norm": metrics.pop("grad_norm"), "value/lr": lr}
        return own | metrics

    def state(self) -> ScalarState:
        return self.scalar_trainer.state()

    def load_state(self, state: ScalarState) -> None:
        self.scalar_trainer.load_state(state)

    def _loss(self, values_N: Tensor, *, old_values_N: Tensor, returns_N: Tensor) -> TokenLoss:
        return value_loss(values_N, old_values_N, returns_N, self.config.value_clip)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R): 1 for a critic that knows all, 0 for a constant, below 0 for worse than that. None where
    all returns are equal."""
    variance = returns_N.double().var(unbiased=False)
    if returns_N.numel() == 0 or float(variance) == 0.0:
        return None
    return float(1.0 - (returns_N.double() - values_N.double()).var(unbiased=False) / variance)
