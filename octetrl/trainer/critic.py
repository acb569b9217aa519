"""PPO's critic: a separate value model with its own optimizer, trained beside the policy.

    before the first update on a batch   V_old of every trained token, without gradient; GAE computes advantages and
                                         returns from it
    after each update of the policy      one update on the same minibatch, by the clipped value loss
    `pretrain_steps`                     the number of steps that train only the critic, because the advantages of an
                                         untrained critic are noise

V of a token is the scalar at the token before it: the expected return of the prefix, before the token is sampled. Token
weights and the denominator are those of the policy's loss. The result does not depend on packing or micro-batches.

The critic is not a second head on the policy. A shared trunk would save a model and its optimizer. But the value loss
would then change the weights that the engine samples with, and the two gradients would need relative weights.

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
from octetrl.trainer.optimizer import learning_rate
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import MetricMeans, PreparedMicroBatch, gathered_rewards
from octetrl.trainer.scalar_trainer import ScalarPart, ScalarState, ScalarTrainer


class Critic:
    """The value model with its optimizer, owned by the trainer. Micro-batches must be on the device."""

    def __init__(
        self,
        model: ScalarDecoder,
        config: CriticConfig,
        trainer: TrainerConfig,
        *,
        total_steps: int,
        seed: int = 0,
        peers: Peers = ALONE,
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self.pretrain_steps = config.pretrain_steps  # so many first steps train only the critic
        self.scalar_trainer = ScalarTrainer(model, trainer, config.optimizer, seed=seed, peers=peers)

    @property
    def weights_are_whole(self) -> bool:
        """False from the first optimizer step of a `train` call until `finish`."""
        return self.scalar_trainer.weights_are_whole

    def finish(self) -> None:
        """Mark the updates on a batch as complete."""
        self.scalar_trainer.weights_are_whole = True

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """V of each trained token, float32 [N]. NonFiniteError names the sample and position of a non-finite value."""
        return self._values_and_after(micro_batch)[0]

    @torch.no_grad()
    def _values_and_after(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """V of each trained token; and V after it where `cut_off_N`, 0 elsewhere: float32 [N] each."""
        rows_N, cut_off_N = micro_batch.predictor_N, micro_batch.cut_off_N
        if cut_off_N is None:
            cut_off_N = torch.zeros_like(rows_N, dtype=torch.bool)
        rows_R = torch.cat([rows_N, rows_N[cut_off_N] + 1])  # the scalar at a token is the value after it
        values_N, after_R = self.scalar_trainer.scalars(micro_batch, rows_R).tensor_split([len(rows_N)])
        after_N = torch.zeros_like(values_N).masked_scatter(cut_off_N, after_R)
        for one_N in (values_N, after_N):
            _refuse_non_finite(one_N, micro_batch)
        return values_N, after_N

    def prepare(
        self, prepared: Sequence[PreparedMicroBatch], returns: Callable[[TokenRewards], Tensor], kl_scale: float = 1.0
    ) -> dict[str, float]:
        """Fill in values and returns of this worker's micro-batches of one `train` call; returns metrics of the values.

        Call it before any update, and before advantages replace the rewards. Raises NonFiniteError on all workers.
        """
        peers = self.scalar_trainer.peers
        error = None
        try:
            for one in prepared:
                one.values_N, one.after_N = self._values_and_after(one.micro_batch)
        except NonFiniteError as found:
            error = str(found)
        if error := peers.agree(error, "values"):
            raise NonFiniteError(error)
        rewards, own = gathered_rewards(prepared, peers)
        rewards = replace(rewards, kl_scale=kl_scale)
        assert rewards.values_N is not None
        returns_N = returns(rewards)
        counts = [one.micro_batch.targets_N.numel() for one in prepared]
        for one, part_N in zip(prepared, returns_N[own].split(counts), strict=True):
            one.returns_N = part_N
        explained = explained_variance(rewards.values_N, returns_N)
        return {} if explained is None else {"value/explained_variance": explained}

    def update(
        self, minibatch: Sequence[PreparedMicroBatch], denominator: float, place: int, means: MetricMeans
    ) -> dict[str, float]:
        """Run one optimizer step; returns its metrics, such as loss, gradient norm and learning rate.

        `place`: steps of the run before this one. The metrics of the tokens are added to `means`. NonFiniteError:
        nothing was updated.
        """
        parts = [self._part(one) for one in minibatch]
        lr = learning_rate(place, self.config.optimizer, self.total_steps)
        found = self.scalar_trainer.update(parts, denominator, lr, means)
        return {f"value/{name}": value for name, value in found.items()} | {"value/lr": lr}

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
    """1 - Var(R - V) / Var(R), from float32 [N] tensors; None if all returns are equal.

    It is 1 for a perfect critic, 0 for a constant one, and negative for one that is worse than a constant.
    """
    if not tensor_differs(returns_N):
        return None
    variance = returns_N.double().var(unbiased=False)
    return float(1.0 - (returns_N.double() - values_N.double()).var(unbiased=False) / variance)


def _refuse_non_finite(values_N: Tensor, micro_batch: MicroBatch) -> None:
    """Raise NonFiniteError if a value is not finite. It names the sample and position of the first one."""
    finite_N = values_N.isfinite()
    if bool(finite_N.all()):
        return
    first = int((~finite_N).nonzero()[0, 0])
    raise NonFiniteError(
        f"the value of sample {int(micro_batch.sample_N[first])} of the batch at position"
        f" {int(micro_batch.target_positions_N[first])} is {float(values_N[first])} ({int((~finite_N).sum())} such in"
        f" its micro-batch); nothing was updated"
    )
