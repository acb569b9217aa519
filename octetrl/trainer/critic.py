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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octetrl.algorithms.spread import tensor_differs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.value_loss import value_loss
from octetrl.config.schema import CriticConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import MicroBatch
from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.prepared import PreparedMicroBatch, token_rewards
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
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self.pretrain_steps = config.pretrain_steps  # from policy versions below it, the critic alone learns
        self.scalar_trainer = ScalarTrainer(model, trainer, config.optimizer, seed=seed)

    @property
    def weights_are_whole(self) -> bool:
        """False from the first optimizer step of a `train` call until `finish`."""
        return self.scalar_trainer.weights_are_whole

    def finish(self) -> None:
        """The updates on a batch are done."""
        self.scalar_trainer.weights_are_whole = True

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V of each trained token, float32 [N]. NonFiniteError names the sample and position of one that is not."""
        values_N = self.scalar_trainer.scalars(micro_batch, micro_batch.predictor_N)
        _refuse_non_finite(values_N, micro_batch)
        return values_N

    def prepare(
        self, prepared: Sequence[PreparedMicroBatch], returns: Callable[[TokenRewards], Tensor], kl_scale: float = 1.0
    ) -> dict[str, float]:
        """Values and returns of these micro-batches, all of one `train` call, before any update and before advantages
        take the rewards' place; and how good the values were."""
        for one in prepared:
            one.values_N = self.values(one.micro_batch)
        rewards = replace(token_rewards(prepared), kl_scale=kl_scale)
        assert rewards.values_N is not None
        returns_N = returns(rewards)
        counts = [one.micro_batch.targets_N.numel() for one in prepared]
        for one, part_N in zip(prepared, returns_N.split(counts), strict=True):
            one.returns_N = part_N
        explained = explained_variance(rewards.values_N, returns_N)
        return {} if explained is None else {"value/explained_variance": explained}

    def update(
        self, minibatch: Sequence[PreparedMicroBatch], denominator: float, policy_version: int, means: MetricMeans
    ) -> dict[str, float]:
        """One optimizer step; returns its loss, gradient norm and rate, and adds the metrics of tokens to `means`."""
        parts = [self._part(one) for one in minibatch]
        lr = learning_rate(policy_version, self.config.optimizer, self.total_steps)
        found = self.scalar_trainer.update(parts, denominator, lr, means)
        return {"value/loss": found["loss"], "value/grad_norm": found["grad_norm"], "value/lr": lr}

    def state(self) -> ScalarState:
        return self.scalar_trainer.state()

    def load_state(self, state: ScalarState) -> None:
        self.scalar_trainer.load_state(state)

    def _part(self, one: PreparedMicroBatch) -> ScalarPart:
        assert one.values_N is not None and one.returns_N is not None, "`prepare` comes first"
        loss = partial(
            value_loss, old_values_N=one.values_N, returns_N=one.returns_N, value_clip=self.config.value_clip
        )
        return ScalarPart(one.micro_batch, one.micro_batch.predictor_N, loss, one.micro_batch.weights_N)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R): 1 for a critic that knows all, 0 for a constant, below 0 for worse than that. None where
    all returns are equal."""
    if not tensor_differs(returns_N):
        return None
    variance = returns_N.double().var(unbiased=False)
    return float(1.0 - (returns_N.double() - values_N.double()).var(unbiased=False) / variance)


def _refuse_non_finite(values_N: Tensor, micro_batch: MicroBatch) -> None:
    """NonFiniteError naming the first value that is not finite, by sample and position."""
    finite_N = values_N.isfinite()
    if bool(finite_N.all()):
        return
    first = int((~finite_N).nonzero()[0, 0])
    raise NonFiniteError(
        f"the value of sample {int(micro_batch.sample_N[first])} of the batch at position"
        f" {int(micro_batch.target_positions_N[first])} is {float(values_N[first])} ({int((~finite_N).sum())} such in"
        f" its micro-batch); nothing was stepped"
    )
