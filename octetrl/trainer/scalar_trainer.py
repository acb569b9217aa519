"""Trains a decoder with a scalar head: the common part of the critic and of a reward model.

One optimizer step over some micro-batches:

    for each micro-batch:  hidden = model(tokens);  scalars of the rows that the loss reads;  loss per item
                           sum(weights * loss) / denominator, backward
    clip the global norm;  check that all is finite;  AdamW;  quantise every FP8 weight once

It is the policy's step (trainer/trainer.py) with the same layers, activation checkpointing, FP8 linears and optimizer,
and another head. K and V are not replayed through the rollout's cache, because no tokens are sampled with these
weights.

T tokens of a micro-batch, R rows that the loss reads, I items of the loss (tokens, or pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import TokenLoss
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.layers.context import PackedContext
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import MicroBatch
from octetrl.trainer.activation_checkpoint import layer_runner
from octetrl.trainer.optimizer import copy_all
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import MetricMeans
from octetrl.trainer.shared_weights import optimizer_of


@dataclass(frozen=True, slots=True)
class ScalarPart:
    """A micro-batch of an optimizer step, on the device."""

    micro_batch: MicroBatch
    rows_R: Tensor  # int64 index into T
    loss: Callable[[Tensor], TokenLoss]  # scalars float32 [R] -> loss of each item [I]
    weights_I: Tensor


@dataclass(frozen=True, slots=True)
class ScalarState:
    """The complete state of this model's training. Live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


class ScalarTrainer:
    """Owns the optimizer. `model` must be loaded and quantised. `trains` false: no optimizer state is allocated."""

    def __init__(
        self,
        model: ScalarDecoder,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        trains: bool = True,
        peers: Peers = ALONE,
    ) -> None:
        self.model, self.peers = model, peers
        self.device = model.lm_head_weight.device
        self.optimizer, self.weights = optimizer_of(
            model, optimizer, seed=seed, peers=peers, trains=trains, gradients=config.gradients
        )
        self.weights_are_whole = True  # false from an optimizer step until the owner sets it
        self._run_layer = layer_runner(model, config.activation_checkpointing, config.checkpointed_layers)
        self._remakes_codes = config.weight_codes == "remade"

    def scalars(self, micro_batch: MicroBatch, rows_R: Tensor) -> Tensor:
        """Scalars of the rows, float32 [R], differentiable if gradients are enabled. `rows_R`: int64 index into T."""
        context = PackedContext(micro_batch.cu_seqlens_B1, micro_batch.max_seqlen)
        hidden_TE: Tensor = self.model(micro_batch.token_ids_T, micro_batch.positions_T, context, self._run_layer)
        return self.model.scalars(hidden_TE.index_select(0, rows_R))

    def update(
        self, parts: Sequence[ScalarPart], denominator: float, lr: float, means: MetricMeans
    ) -> dict[str, float]:
        """Run one optimizer step; returns loss and gradient norm, and adds the losses' metrics to `means`.

        `parts`: this worker's micro-batches. `denominator`: of all workers. NonFiniteError: nothing was updated.
        """
        with self.model.codes_released() if self._remakes_codes else nullcontext():
            return self._step(parts, denominator, lr, means)

    def _step(self, parts: Sequence[ScalarPart], denominator: float, lr: float, means: MetricMeans) -> dict[str, float]:
        self.optimizer.zero_grad()
        most_parts = max(self.peers.gather_records(len(parts), "micro-batches"))
        loss = torch.zeros((), device=self.device)
        for part in parts:
            loss = loss + self.backward(part, denominator, means)
            self.optimizer.gradients.end_micro_batch()
        for _ in range(most_parts - len(parts)):
            self.optimizer.gradients.end_micro_batch()  # another worker has one more
        norm = self.optimizer.clip_gradients()
        totals = [*self.peers.sum(loss.reshape(1), "loss"), norm.double()]
        metrics = dict(zip(("loss", "grad_norm"), torch.stack(totals).tolist(), strict=True))
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            where = self.peers.agree(self._first_non_finite(parts), "non-finite numbers") or "every scalar is finite"
            found = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
            raise NonFiniteError(f"scalar head: {found}: {where}; nothing was updated")
        if self.optimizer.gradients.rounding is not None:
            metrics |= self.optimizer.gradients.rounding.take_metrics()
        self.weights_are_whole = False
        self.optimizer.step(lr)
        self.weights.renew()
        return metrics

    def backward(self, part: ScalarPart, denominator: float, means: MetricMeans) -> Tensor:
        """Add one micro-batch's gradient to the sums; returns its part of the loss, a float32 scalar."""
        token_loss = part.loss(self.scalars(part.micro_batch, part.rows_R))
        loss = (part.weights_I * token_loss.loss_N).sum() / denominator
        loss.backward()
        means.add(token_loss.metrics)
        return loss.detach()

    def state(self) -> ScalarState:
        """The weights and optimizer state of the rows that this worker owns."""
        weights = {slot.name: slot.weight for slot in self.optimizer.slots}
        return ScalarState(weights, self.optimizer.state_tensors())

    def load_state(self, state: ScalarState) -> None:
        """Restore what `state` returned, in place, bit for bit. UserError if it belongs to another model."""
        copy_all(self.state().weights, state.weights, what="weights")
        self.optimizer.load_state_tensors(state.optimizer)
        self.weights.renew()

    def _first_non_finite(self, parts: Sequence[ScalarPart]) -> str | None:
        """The first micro-batch of this worker with a non-finite scalar or gradient, in words."""
        for index, part in enumerate(parts):
            at = f"micro-batch {index + 1} of {len(parts)}"
            with torch.no_grad():
                finite_R = self.scalars(part.micro_batch, part.rows_R).isfinite()
            if not bool(finite_R.all()):
                first = int(part.rows_R[int((~finite_R).nonzero()[0, 0])])
                return f"the first non-finite scalar is in {at}, token {first}"
            with self.optimizer.gradients.inspect() as bad:
                self.backward(part, 1.0, MetricMeans())
            if bad:
                return f"first non-finite gradient '{bad[0]}' ({len(bad)} in all) in {at}"
        return None
