"""Training a decoder with a scalar head: what the critic and a reward model have in common.

One optimizer step over some micro-batches:

    for each micro-batch:  hidden = model(tokens);  scalars of the rows that the loss reads;  loss per item
                           sum(weights * loss) / denominator, backward
    clip the global norm;  look whether all is finite;  AdamW;  quantise every FP8 weight once

It is the policy's step (trainer/trainer.py) with the same layers, activation checkpointing, FP8 linears and optimizer,
and another head. K and V are not replayed through the rollout's cache: nobody drew tokens with these weights.

T tokens of a micro-batch, R rows that the loss reads, I items of the loss (tokens, or pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import TokenLoss
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.layers.context import PackedContext
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import MicroBatch
from octetrl.trainer.activation_checkpoint import layer_runner
from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.optimizer import Optimizer, copy_all


@dataclass(frozen=True, slots=True)
class ScalarPart:
    """A micro-batch of an optimizer step, on the device."""

    micro_batch: MicroBatch
    rows_R: Tensor  # int64 index into T
    loss: Callable[[Tensor], TokenLoss]  # scalars float32 [R] -> loss of each item [I]
    weights_I: Tensor


@dataclass(frozen=True, slots=True)
class ScalarState:
    """All that a resumed trainer of this model needs; live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


class ScalarTrainer:
    """Owns the optimizer. `model` comes loaded and quantised; `trains` false makes no optimizer state."""

    def __init__(
        self, model: ScalarDecoder, config: TrainerConfig, optimizer: OptimizerConfig, *, seed: int, trains: bool = True
    ) -> None:
        self.model = model
        self.device = model.lm_head_weight.device
        self.optimizer = Optimizer(model.trained_parameters() if trains else (), optimizer, seed=seed)
        self.weights_are_whole = True  # false from an optimizer step until its owner says that the update is done
        self._run_layer = layer_runner(model, config.activation_checkpointing, config.checkpointed_layers)
        self._remakes_codes = config.weight_codes == "remade"

    def scalars(self, micro_batch: MicroBatch, rows_R: Tensor) -> Tensor:
        """float32 [R], differentiable where gradients are on."""
        context = PackedContext(micro_batch.cu_seqlens_B1, micro_batch.max_seqlen)
        hidden_TE: Tensor = self.model(micro_batch.token_ids_T, micro_batch.positions_T, context, self._run_layer)
        return self.model.scalars(hidden_TE.index_select(0, rows_R))

    def update(
        self, parts: Sequence[ScalarPart], denominator: float, lr: float, means: MetricMeans
    ) -> dict[str, float]:
        """One optimizer step; returns the loss and the gradient norm, and adds the losses' metrics to `means`.
        NonFiniteError: no step."""
        with self.model.codes_released() if self._remakes_codes else nullcontext():
            return self._step(parts, denominator, lr, means)

    def _step(self, parts: Sequence[ScalarPart], denominator: float, lr: float, means: MetricMeans) -> dict[str, float]:
        self.optimizer.zero_grad()
        losses = [self.backward(part, denominator, means) for part in parts]
        loss = sum(losses, start=torch.zeros_like(losses[0]))
        totals = {"loss": loss, "grad_norm": self.optimizer.clip_gradients()}
        metrics = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise NonFiniteError(self._blame(parts, metrics))
        self.weights_are_whole = False
        self.optimizer.step(lr)
        self.model.requantize()
        return metrics

    def backward(self, part: ScalarPart, denominator: float, means: MetricMeans) -> Tensor:
        """Adds one micro-batch's gradient; returns its share of the loss. `means` gets the metrics of its items."""
        token_loss = part.loss(self.scalars(part.micro_batch, part.rows_R))
        loss = (part.weights_I * token_loss.loss_N).sum() / denominator
        loss.backward()
        means.add(token_loss.metrics)
        return loss.detach()

    def state(self) -> ScalarState:
        weights = {name: parameter.detach() for name, parameter in self.model.trained_parameters()}
        return ScalarState(weights, self.optimizer.state_tensors())

    def load_state(self, state: ScalarState) -> None:
        """The inverse of `state`, in place, bit for bit. UserError when it is another model's."""
        copy_all(self.state().weights, state.weights, what="weights")
        self.optimizer.load_state_tensors(state.optimizer)
        self.model.requantize()

    def _blame(self, parts: Sequence[ScalarPart], metrics: Mapping[str, float]) -> str:
        found = f"scalar head: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        for index, part in enumerate(parts):
            with torch.no_grad():
                finite_R = self.scalars(part.micro_batch, part.rows_R).isfinite()
            if not bool(finite_R.all()):
                first = int(part.rows_R[int((~finite_R).nonzero()[0, 0])])
                where = f"micro-batch {index + 1} of {len(parts)}, token {first}"
                return f"{found}: the first scalar that is not finite is that of {where}; nothing was stepped"
        bad = self.optimizer.non_finite_gradients()
        where = f", first non-finite gradient '{bad[0]}' ({len(bad)} in all)" if bad else ""
        return f"{found}, every scalar is finite{where}; nothing was stepped"


def on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(micro_batch, **moved)
