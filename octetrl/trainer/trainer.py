"""The trainer: a packed batch in, one update of the weights out.

One `train` call is `epochs` passes over `minibatches` optimizer steps. It is made of verbs that can be called apart,
so that several workers can share a batch:

    prepare      what must not move during the call, without gradient: the reference's log-probs for a KL term or a
                 teacher, the policy's own where a step needs them before the update, the critic's values
    shape        what the whole batch decides: advantages token by token, returns, means over an optimizer step
    accumulate   for each micro-batch: hidden states, log-probs of the trained tokens, algorithm.loss per token;
                 sum(weights * loss) / denominator, backward           the only division in the project
    update       clip the global norm; check that all is finite; AdamW; quantise every FP8 weight once
    finish       the version counts up; metrics, log-probs and the amax of K and V come out in a `PolicyUpdate`

With one optimizer step and samples drawn by these very weights, the ratio is exactly 1, and no second forward is
needed. The reference may be another model (a teacher). It never replays scales that are not its own.

N trained tokens of a micro-batch, L layers, K KV heads, E hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.algorithms.corrections import effective_sample_size
from octetrl.algorithms.finite import count_non_finite, first_non_finite
from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError as NonFiniteError
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch, PackedBatch, PolicyUpdate
from octetrl.trainer.critic import Critic
from octetrl.trainer.forward import Forward
from octetrl.trainer.forward import KVReplay as KVReplay
from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.optimizer import Optimizer, copy_all
from octetrl.trainer.packing import PackingLayout, pack_for_calibration
from octetrl.trainer.prepared import (
    PreparedMicroBatch,
    fill_step_means,
    loss_inputs,
    shape_advantages,
    token_logprobs,
)
from octetrl.trainer.reference import Reference
from octetrl.trainer.scalar_trainer import on_device
from octetrl.trainer.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class TrainerState:
    """All that a resumed trainer needs; live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    policy_version: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step minimises."""

    micro_batches: Sequence[PreparedMicroBatch]
    kv: KVReplay
    on_policy: bool
    denominator: float


@dataclass(slots=True)
class TrainCall:
    """One call of `train`, from `prepare` to `finish`."""

    steps: tuple[OptimizerStep, ...]  # of one epoch
    epochs: int
    lr: float | None  # None: the critic learns alone
    kv_amax_2LK: Tensor | None  # raised by the forwards; None: not collected
    started: float
    means: MetricMeans = field(default_factory=MetricMeans)
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole batch, before the first update
    updates: list[dict[str, float]] = field(default_factory=list)  # of each optimizer step

    @property
    def micro_batches(self) -> Iterator[PreparedMicroBatch]:
        return (one for step in self.steps for one in step.micro_batches)


class Accumulated(NamedTuple):
    """What micro-batches add to an optimizer step; scalars on the device."""

    loss: Tensor
    non_finite: Tensor  # numbers that are not finite


class Trainer:
    """Owns the optimizer and the policy version. `model` and `reference` come loaded and quantised.

    `policy_version` counts the `train` calls that changed the weights, and is the step of the learning-rate schedule.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        config: TrainerConfig,
        algorithm: Algorithm,
        temperature: float,
        total_steps: int,
        reference: Decoder | None = None,
        critic: Critic | None = None,
        collect_kv_amax: bool = False,
        seed: int = 0,
        trains: bool = True,
    ) -> None:
        assert (critic is not None) == algorithm.needs_values or not trains, "critic and needs_values disagree"
        self.model, self.reference, self.critic = model, Reference(reference, algorithm), critic
        self.config, self.algorithm, self.total_steps = config, algorithm, total_steps
        self.policy_version = 0
        self.device = model.lm_head_weight.device
        self.optimizer = Optimizer(model.trained_parameters() if trains else (), config.optimizer, seed=seed)
        self._is_stepping = False  # from the first optimizer step of a `train` call to its end
        self._collects_in_training = collect_kv_amax
        self._remakes_codes = config.weight_codes == "remade"
        self._poisoned = torch.zeros((), dtype=torch.int64, device=self.device)  # tokens, in all forwards of a `train`
        self.forward = Forward(model, config, temperature, self._poisoned)
        self.reference_forward: Forward | None = None
        if reference is not None:
            self.reference_forward = Forward(reference, config, temperature, self._poisoned, is_trained=False)

    @property
    def weights_are_whole(self) -> bool:
        """False while a `train` call changes weights, the critic's included."""
        return not self._is_stepping and (self.critic is None or self.critic.weights_are_whole)

    @property
    def layout(self) -> PackingLayout:
        """How `pack` should pack for this trainer."""
        return PackingLayout(
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
            minibatches=self.config.minibatches,
            padded_attention=self.device.type == "cpu",
            precision_digest=self.model.policy.digest,
        )

    # ------------------------------------------------------------ one call

    def train(self, batch: PackedBatch, kv: KVReplay, precision_digest: str | None) -> PolicyUpdate:
        """Learns from `batch`, whose samples were drawn with the cache `kv` under the table `precision_digest`.

        An empty batch changes nothing, the version included. Raises NonFiniteError naming the micro-batch, RuntimeError
        when the samples' precision table is not the trainer's.
        """
        self._check_digest(precision_digest)
        if not batch.minibatches:
            return PolicyUpdate(self.policy_version, {"train/skipped": 1.0})
        call = self.prepare(batch, kv)
        self.shape(call)
        for _ in range(call.epochs):
            for step in call.steps:
                update = {} if call.lr is None else self._one_step(call, step, call.lr)
                if self.critic is not None:
                    update |= self.critic.update(step.micro_batches, step.denominator, self.policy_version, call.means)
                call.updates.append(update)
        return self.finish(call)

    def prepare(self, batch: PackedBatch, kv: KVReplay) -> TrainCall:
        """Puts the micro-batches on the device, with the log-probs and values that stay as they are during the call."""
        started = time.perf_counter()
        self._poisoned.zero_()
        amax_2LK = self.forward.unobserved_amax() if self._collects_in_training else None
        lr = self._learning_rate()
        num_updates = self.config.epochs * len(batch.minibatches)
        on_policy = num_updates == 1 and batch.policy_version == self.policy_version
        steps = tuple(
            OptimizerStep(
                [self._prepare(one, kv, amax_2LK, updates=0 if lr is None else num_updates) for one in minibatch],
                kv,
                on_policy,
                denominator,
            )
            for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True)
        )
        return TrainCall(steps, self.config.epochs, lr, amax_2LK, started)

    def shape(self, call: TrainCall) -> None:
        """Fills in what follows from the whole batch, or from a whole optimizer step: returns, advantages, means."""
        prepared = list(call.micro_batches)
        if self.critic is not None and self.algorithm.returns is not None:
            call.metrics |= self.critic.prepare(prepared, self.algorithm.returns, self.reference.kl_scale)
        if self.algorithm.shape is not None:
            log_ratio_N = shape_advantages(self.algorithm.shape, prepared, self.reference.kl_scale)
            if self.algorithm.shaping_kl is not None and log_ratio_N is not None:
                call.means.add({"kl": self.algorithm.shaping_kl(log_ratio_N)})
        for step in call.steps:
            fill_step_means(self.algorithm.step_means, step.micro_batches, step.on_policy)

    def accumulate(self, call: TrainCall, step: OptimizerStep) -> Accumulated:
        """Adds the gradient of these micro-batches to the sums. Codes that are `remade` must have been released."""
        shares = [self._backward(step, one, call.means, call.kv_amax_2LK) for one in step.micro_batches]
        return Accumulated(*(sum(parts, start=torch.zeros_like(parts[0])) for parts in zip(*shares, strict=True)))

    def update(self, step: OptimizerStep, accumulated: Accumulated, lr: float) -> dict[str, float]:
        """One optimizer step with the summed gradients; returns its loss, gradient norm and time.

        Raises NonFiniteError naming the micro-batch; nothing was stepped then.
        """
        totals = {
            "loss": accumulated.loss,
            "grad_norm": self.optimizer.clip_gradients(),
            "non_finite": accumulated.non_finite,
        }
        metrics = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
        if metrics.pop("non_finite") or not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise NonFiniteError(self._blame(step, metrics))
        self._is_stepping = True
        self.optimizer.step(lr)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self.model.requantize()
        metrics["time/requantize"] = time.perf_counter() - started
        return metrics

    def finish(self, call: TrainCall) -> PolicyUpdate:
        """The weights are those of a new version. The update carries what the call learnt."""
        self.policy_version += 1
        self._is_stepping = False
        if self.critic is not None:
            self.critic.finish()
        num_updates = len(call.updates)
        metrics = {name: sum(update[name] for update in call.updates) / num_updates for name in call.updates[0]}
        metrics |= call.metrics | call.means.read()
        metrics |= effective_sample_size(metrics)
        kl = None if call.lr is None else metrics.get("kl")
        metrics |= self.reference.follow(self.model, self.policy_version, kl)
        if call.lr is not None:
            metrics["time/requantize"] *= num_updates
        metrics["lr"] = call.lr or 0.0
        metrics["train/updates"] = float(num_updates)
        metrics["train/non_finite_tokens"] = float(self._poisoned)
        tokens = sum(one.micro_batch.token_ids_T.numel() for one in call.micro_batches)
        logprobs = token_logprobs(list(call.micro_batches))
        metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - call.started)
        return PolicyUpdate(self.policy_version, metrics, logprobs, call.kv_amax_2LK)

    def _one_step(self, call: TrainCall, step: OptimizerStep, lr: float) -> dict[str, float]:
        with self.model.codes_released() if self._remakes_codes else nullcontext():
            self.optimizer.zero_grad()
            return self.update(step, self.accumulate(call, step), lr)

    # ------------------------------------------------------------ forwards alone

    def accumulate_alone(
        self, batch: PackedBatch, kv: KVReplay, *, collect_kv_amax: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the on-policy gradient of every micro-batch and updates nothing, for benchmarks and the doctor.

        Returns the loss, on the device, and the amax of K and V, float32 [2, L, K], where it is asked for. Codes that
        are `remade` come back with the model's `requantize`.
        """
        assert self._collects_in_training or not collect_kv_amax, "built with collect_kv_amax=False"
        amax_2LK = self.forward.unobserved_amax() if collect_kv_amax else None
        if self._remakes_codes:
            self.model.release_codes()
        loss = torch.zeros((), device=self.device)
        for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True):
            prepared = [PreparedMicroBatch(on_device(micro_batch, self.device)) for micro_batch in minibatch]
            step = OptimizerStep(prepared, kv, on_policy=True, denominator=denominator)
            for one in prepared:
                loss += self._backward(step, one, MetricMeans(), amax_2LK).loss
        return loss, amax_2LK

    def observe_kv(self, tokens: PackedBatch | Sequence[Sequence[int]]) -> Tensor:
        """max|K| and max|V|, float32 [2, L, K] on the device, of one forward with the present weights and no replay:
        for the first step's prompts and for `calibration: exact`. A head that met no token holds NEVER_OBSERVED."""
        if isinstance(tokens, PackedBatch):
            micro_batches: Sequence[MicroBatch] = [m for minibatch in tokens.minibatches for m in minibatch]
        else:
            micro_batches = pack_for_calibration(tokens, self.layout)
        amax_2LK = self.forward.unobserved_amax()
        with torch.no_grad():
            for micro_batch in micro_batches:
                self.forward.hidden(on_device(micro_batch, self.device), KVReplay(), amax_2LK)
        return amax_2LK

    # ------------------------------------------------------------ state

    def state(self) -> TrainerState:
        weights = {name: parameter.detach() for name, parameter in self.model.trained_parameters()}
        return TrainerState(weights, self.optimizer.state_tensors(), self.policy_version)

    def load_state(self, state: TrainerState) -> None:
        """The inverse of `state`, in place, bit for bit. UserError when it is another model's."""
        copy_all(self.state().weights, state.weights, what="weights")
        self.optimizer.load_state_tensors(state.optimizer)
        self.policy_version = state.policy_version
        self.model.requantize()

    def _check_digest(self, precision_digest: str | None) -> None:
        own = self.model.policy.digest
        if precision_digest is not None and precision_digest != own:
            raise RuntimeError(
                f"the samples were drawn under precision table {precision_digest}, the trainer's is {own}:"
                f" build engine and trainer from one policy"
            )

    def _learning_rate(self) -> float | None:
        """Of this step; None while the critic learns alone. The schedule begins after that."""
        alone = 0 if self.critic is None else self.critic.pretrain_steps
        if self.policy_version < alone:
            return None
        return learning_rate(self.policy_version - alone, self.config.optimizer, self.total_steps - alone)

    # ------------------------------------------------------------ one micro-batch

    @torch.no_grad()
    def _prepare(
        self, micro_batch: MicroBatch, kv: KVReplay, amax_2LK: Tensor | None, *, updates: int
    ) -> PreparedMicroBatch:
        """`updates` 0: only the critic's follow, and K and V are observed here."""
        micro_batch = on_device(micro_batch, self.device)
        prepared = PreparedMicroBatch(micro_batch)
        reference = self.reference_forward
        if reference is not None:
            seen = kv if self.reference.replays(kv.kv_mode) else KVReplay()
            hidden_NE = reference.predictors(micro_batch, seen)
            prepared.reference_N, _ = reference.logprobs_of(hidden_NE, micro_batch)
            k, below = self.algorithm.teacher_top_k, self.model.spec.vocab_size
            if k:
                prepared.teacher_ids_NK, prepared.teacher_top_NK = reference.top_logprobs(hidden_NE, k, below)
        needs_proximal = self.algorithm.needs_proximal and updates > 1
        shapes_with_kl = self.algorithm.shape is not None and reference is not None
        if needs_proximal or shapes_with_kl or self.algorithm.step_means or not updates:
            prepared.first_N, _ = self.forward.logprobs(micro_batch, kv, None if updates else amax_2LK)
            prepared.proximal_N = prepared.first_N if needs_proximal else None
        return prepared

    def _backward(
        self,
        step: OptimizerStep,
        prepared: PreparedMicroBatch,
        means: MetricMeans,
        amax_2LK: Tensor | None,
        found: list[str | None] | None = None,
    ) -> Accumulated:
        """Adds one micro-batch's gradient; returns its share of the loss. `means` gets its metrics, `found` the first
        number that is not finite, in words."""
        micro_batch = prepared.micro_batch
        hidden_NE = self.forward.predictors(micro_batch, step.kv, amax_2LK)
        logprobs_N, entropy_N = self.forward.logprobs_of(hidden_NE, micro_batch)
        ids_NK = prepared.teacher_ids_NK
        top_NK = None if ids_NK is None else self.forward.logprobs_at(hidden_NE, ids_NK)
        if prepared.first_N is None and not self._is_stepping:
            prepared.first_N = logprobs_N.detach()
        kl_scale = self.reference.kl_scale
        inputs = loss_inputs(
            prepared, logprobs_N, entropy_N, on_policy=step.on_policy, kl_scale=kl_scale, top_logprobs_NK=top_NK
        )
        token_loss = self.algorithm.loss(inputs)
        if found is not None:
            found.append(first_non_finite(inputs, token_loss, micro_batch))
        loss = (micro_batch.weights_N * token_loss.loss_N).sum() / step.denominator
        loss.backward()
        means.add({"entropy": entropy_N, **token_loss.metrics})
        return Accumulated(loss.detach(), count_non_finite(inputs, token_loss))

    def _blame(self, step: OptimizerStep, metrics: Mapping[str, float]) -> str:
        """Runs the micro-batches of a failed step again, one by one, to name the one and the tensor."""
        found = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        found += f", tokens with non-finite activations: {int(self._poisoned)}"
        count = len(step.micro_batches)
        for index, prepared in enumerate(step.micro_batches):
            self.optimizer.zero_grad()
            number: list[str | None] = []
            loss = float(self._backward(step, prepared, MetricMeans(), None, number).loss)
            bad = self.optimizer.non_finite_gradients()
            if bad or number[0] or not math.isfinite(loss):
                where = f", {number[0]}" if number[0] else ""
                where += f", first non-finite gradient '{bad[0]}' ({len(bad)} in all)" if bad else ""
                longest = prepared.micro_batch.max_seqlen
                return (
                    f"{found}: micro-batch {index + 1} of {count} (longest sequence {longest} tokens) has loss"
                    f" {loss}{where}; nothing was stepped, the weights are those of version {self.policy_version}"
                )
        return f"{found}: finite in each of {count} micro-batches, not in their sum; nothing was stepped"
