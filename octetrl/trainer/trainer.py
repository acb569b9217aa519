"""The trainer: turns a packed batch into one update of the weights.

One `train` call runs `epochs` passes over `minibatches` optimizer steps. It consists of these verbs:

    prepare      what stays constant during the call, without gradient: log-probs of the reference (for a KL term) or
                 the teacher, the policy's own if a step needs them before the update, the critic's values
    shape        what depends on the whole batch: advantages per token, returns, means over an optimizer step
    accumulate   for each micro-batch: hidden states, log-probs of the trained tokens, algorithm.loss per token;
                 sum(weights * loss) / denominator, backward           the only division in the project
    update       clip the global norm; check that all is finite; AdamW; quantise every FP8 weight once
    finish       increment the version; return metrics, log-probs and the amax of K and V in a `PolicyUpdate`

With one optimizer step on samples drawn with the current weights, the ratio is exactly 1 and no second forward is
needed. The reference may be another model (a teacher). Its forward never uses KV scales of the policy.

N trained tokens of a micro-batch, L layers, S scales of a layer's cache, E hidden size, K tokens of a teacher.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from octetrl.algorithms.corrections import effective_sample_size
from octetrl.algorithms.finite import count_non_finite, first_non_finite
from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch, PackedBatch, PolicyUpdate
from octetrl.trainer.critic import Critic
from octetrl.trainer.forward import Forward, KVReplay
from octetrl.trainer.optimizer import copy_all, place_of, rate_after
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import (
    Accumulated,
    MetricMeans,
    OptimizerStep,
    PreparedMicroBatch,
    TrainCall,
    TrainerState,
    check_digest,
    fill_step_means,
    loss_inputs,
    on_device,
    shape_advantages,
    token_logprobs,
)
from octetrl.trainer.reference import Reference
from octetrl.trainer.routers import Routers
from octetrl.trainer.shared_weights import optimizer_of


class Trainer:
    """Owns the optimizer and the policy version. `model` and `reference` must be loaded and quantised.

    `policy_version` counts the `train` calls that changed the weights. The learning rate follows the batch's step.
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
        peers: Peers = ALONE,
    ) -> None:
        assert (critic is not None) == algorithm.needs_values or not trains, "needs_values requires a critic"
        self.model, self.reference, self.critic = model, Reference(reference, algorithm), critic
        self.config, self.algorithm, self.total_steps = config, algorithm, total_steps
        self.policy_version = 0
        self.device = model.lm_head_weight.device
        self.peers = peers
        self.optimizer, self.weights = optimizer_of(
            model, config.optimizer, seed=seed, peers=peers, trains=trains, gradients=config.gradients
        )
        self._is_stepping = False  # true from the first optimizer step of a `train` call to its end
        self.collects_kv_amax = collect_kv_amax
        self.remakes_codes = config.weight_codes == "remade"
        self.poisoned = torch.zeros((), dtype=torch.int64, device=self.device)  # tokens, over a `train`
        self.forward = Forward(model, config, temperature, self.poisoned)
        self.routers = Routers(model, config.router, peers)
        self.reference_forward: Forward | None = None
        if reference is not None:
            self.reference_forward = Forward(reference, config, temperature, self.poisoned, is_trained=False)

    @property
    def weights_are_whole(self) -> bool:
        """False while a `train` call changes the weights of policy or critic."""
        return not self._is_stepping and (self.critic is None or self.critic.weights_are_whole)

    @property
    def layout(self) -> PackingLayout:
        """The settings that `pack` needs."""
        return PackingLayout(
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
            minibatches=self.config.minibatches,
            padded_attention=self.device.type == "cpu",
            precision_digest=self.model.policy.digest,
        )

    # ------------------------------------------------------------ one call

    def train(self, batch: PackedBatch, kv: KVReplay, precision_digest: str | None) -> PolicyUpdate:
        """Update the weights from `batch`, sampled with the cache `kv` under the table `precision_digest`.

        An empty batch changes nothing, not even the version. NonFiniteError names the micro-batch with a non-finite
        number; that optimizer step was not applied. RuntimeError: the samples' precision table is not the trainer's.
        """
        check_digest(precision_digest, self.model.policy.digest)
        if not batch.minibatches:
            return PolicyUpdate(self.policy_version, {"train/skipped": 1.0})
        call = self.prepare(batch, kv)
        self.shape(call)
        for _ in range(call.epochs):
            for step in call.steps:
                update = {} if call.lr is None else self._one_step(call, step, call.lr)
                if self.critic is not None:
                    update |= self.critic.update(step.micro_batches, step.denominator, call.place, call.means)
                call.updates.append(update)
        return self.finish(call)

    def prepare(self, batch: PackedBatch, kv: KVReplay) -> TrainCall:
        """Move the micro-batches to the device and compute the log-probs that stay constant during the call."""
        started = time.perf_counter()
        self.poisoned.zero_()
        self.routers.begin_call()
        amax_LS = self.forward.unobserved_amax() if self.collects_kv_amax else None
        place, num_updates = place_of(batch, self.policy_version), self.config.epochs * len(batch.minibatches)
        lr = self.learning_rate(place)
        on_policy = num_updates == 1 and batch.policy_version == self.policy_version
        counts = self.peers.gather_records([len(minibatch) for minibatch in batch.minibatches], "micro-batches")
        steps = tuple(
            OptimizerStep(
                [self.first_passes(one, kv, amax_LS, updates=0 if lr is None else num_updates) for one in minibatch],
                kv,
                on_policy,
                denominator,
                sum(of_workers),
                max(of_workers),
            )
            for minibatch, denominator, *of_workers in zip(
                batch.minibatches, batch.loss_denominators, *counts, strict=True
            )
        )
        return TrainCall(steps, self.config.epochs, lr, amax_LS, started, place)

    @torch.no_grad()
    def first_passes(
        self, micro_batch: MicroBatch, kv: KVReplay, amax_LS: Tensor | None, *, updates: int
    ) -> PreparedMicroBatch:
        """The micro-batch on the device, with the log-probs that the algorithm needs before the first update.

        `updates`: optimizer steps of the policy in this call. If there are none, the pass also raises `amax_LS`.
        """
        algorithm, reference = self.algorithm, self.reference_forward
        micro_batch = on_device(micro_batch, self.device)
        prepared = PreparedMicroBatch(micro_batch)
        if reference is not None:
            seen = kv if self.reference.replays(kv.kv_mode) else KVReplay()
            hidden_NE = reference.predictors(micro_batch, seen)
            prepared.reference_N, _ = reference.logprobs_of(hidden_NE, micro_batch)
            k, below = algorithm.teacher_top_k, self.model.spec.vocab_size
            if k:
                prepared.teacher_ids_NK, prepared.teacher_top_NK1 = reference.top_logprobs(hidden_NE, k, below)
        needs_proximal = algorithm.needs_proximal and updates > 1
        shapes_with_kl = algorithm.shape is not None and reference is not None
        if needs_proximal or shapes_with_kl or algorithm.step_means or not updates:
            prepared.first_N, _ = self.forward.logprobs(micro_batch, kv, None if updates else amax_LS)
            prepared.proximal_N = prepared.first_N if needs_proximal else None
        return prepared

    def shape(self, call: TrainCall) -> None:
        """Fill in what depends on the whole batch or optimizer step: returns, advantages, means."""
        prepared = list(call.micro_batches)
        if self.critic is not None and self.algorithm.returns is not None:
            call.metrics |= self.critic.prepare(prepared, self.algorithm.returns, self.reference.kl_scale)
        if self.algorithm.shape is not None:
            log_ratio_N = shape_advantages(self.algorithm.shape, prepared, self.reference.kl_scale, self.peers)
            if self.algorithm.shaping_kl is not None and log_ratio_N is not None:
                call.means.add({"kl": self.algorithm.shaping_kl(log_ratio_N)})
        for step in call.steps:
            fill_step_means(self.algorithm.step_means, step.micro_batches, step.on_policy, self.peers)

    def accumulate(self, call: TrainCall, step: OptimizerStep) -> Accumulated:
        """Adds the gradient of these micro-batches to the sums. Codes that are `remade` must have been released."""
        loss, non_finite = (torch.zeros((), device=self.device) for _ in range(2))
        for one in step.micro_batches:
            part = self.backward(step, one, call.means, call.kv_amax_LS)
            self.optimizer.gradients.end_micro_batch()
            loss, non_finite = loss + part.loss, non_finite + part.non_finite
        for _ in range(step.most_micro_batches - len(step.micro_batches)):
            self.optimizer.gradients.end_micro_batch()  # another worker has one more
        return Accumulated(loss, non_finite)

    def update(self, step: OptimizerStep, accumulated: Accumulated, lr: float) -> dict[str, float]:
        """Run one optimizer step with the gradient sums; returns loss, gradient norm and the time to quantise.

        NonFiniteError names the micro-batch with a non-finite number. No worker has updated anything then.
        """
        norm = self.optimizer.clip_gradients()
        sums = self.peers.sum(torch.stack(list(accumulated)), "loss")
        totals = torch.stack([*sums, norm.double()]).tolist()
        metrics = dict(zip(("loss", "non_finite", "grad_norm"), totals, strict=True))
        if metrics.pop("non_finite") or not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise NonFiniteError(self._describe_failed_step(step, metrics))
        self._is_stepping = True
        began = time.perf_counter()
        self.optimizer.step(lr)
        self.routers.finish_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self.weights.renew()
        metrics |= {"time/optimizer": started - began, "time/requantize": time.perf_counter() - started}
        return metrics

    def finish(self, call: TrainCall) -> PolicyUpdate:
        """Increment the version and return the results of the call."""
        self.policy_version += 1
        self._is_stepping = False
        if self.critic is not None:
            self.critic.finish()
        metrics = self._call_metrics(call)
        kl = None if call.lr is None else metrics.get("kl")
        metrics |= self.reference.follow(self.model, self.policy_version, kl)
        logprobs = token_logprobs(list(call.micro_batches), self.peers)
        amax_LS = None if call.kv_amax_LS is None else self.peers.maximum(call.kv_amax_LS, "amax of K and V")
        return PolicyUpdate(self.policy_version, metrics, logprobs, amax_LS)

    def _one_step(self, call: TrainCall, step: OptimizerStep, lr: float) -> dict[str, float]:
        with self.model.codes_released() if self.remakes_codes else nullcontext():
            self.optimizer.zero_grad()
            return self.update(step, self.accumulate(call, step), lr)

    def _call_metrics(self, call: TrainCall) -> dict[str, float]:
        """Means over the optimizer steps and over the trained tokens, and counts. All workers get the same."""
        num_updates = len(call.updates)
        metrics = {name: sum(update[name] for update in call.updates) / num_updates for name in call.updates[0]}
        metrics |= call.metrics | call.means.read(self.peers) | self.routers.metrics()
        metrics |= effective_sample_size(metrics)
        if call.lr is not None:
            metrics |= {name: num_updates * metrics[name] for name in ("time/optimizer", "time/requantize")}
        if self.optimizer.gradients.rounding is not None:
            metrics |= self.optimizer.gradients.rounding.take_metrics()
        metrics["lr"] = call.lr or 0.0
        metrics["train/updates"] = float(num_updates)
        own_tokens = sum(one.micro_batch.token_ids_T.numel() for one in call.micro_batches)
        counts = self.peers.sum(torch.tensor([int(self.poisoned), own_tokens]), "token counts")
        metrics["train/non_finite_tokens"], tokens = counts.tolist()
        metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - call.started)
        return metrics

    # ------------------------------------------------------------ state

    def state(self) -> TrainerState:
        """The weights and optimizer state of the rows that this worker owns."""
        weights = {slot.name: slot.weight for slot in self.optimizer.slots}
        return TrainerState(weights, self.optimizer.state_tensors(), self.policy_version)

    def load_state(self, state: TrainerState) -> None:
        """Restore what `state` returned, in place, bit for bit. UserError if it belongs to another model."""
        copy_all(self.state().weights, state.weights, what="weights")
        self.optimizer.load_state_tensors(state.optimizer)
        self.policy_version = state.policy_version
        self.weights.renew()

    def learning_rate(self, place: int) -> float | None:
        """The policy's rate after `place` steps; None while only the critic is trained. The schedule begins then."""
        first = 0 if self.critic is None else self.critic.pretrain_steps
        return rate_after(first, place, self.config.optimizer, self.total_steps)

    # ------------------------------------------------------------ one micro-batch

    def backward(
        self,
        step: OptimizerStep,
        prepared: PreparedMicroBatch,
        means: MetricMeans,
        amax_LS: Tensor | None,
        found: list[str | None] | None = None,
    ) -> Accumulated:
        """Add one micro-batch's gradient to the sums; returns its part of the loss.

        Its metrics are added to `means`. If `found` is given, the first non-finite number is appended to it in words,
        or None if all are finite.
        """
        micro_batch = prepared.micro_batch
        routers = self.routers.record(step)
        hidden_NE = self.forward.predictors(micro_batch, step.kv, amax_LS, routers)
        logprobs_N, entropy_N = self.forward.logprobs_of(hidden_NE, micro_batch)
        ids_NK = prepared.teacher_ids_NK
        top_NK1 = None if ids_NK is None else self.forward.logprobs_at(hidden_NE, ids_NK)
        if prepared.first_N is None and not self._is_stepping:
            prepared.first_N = logprobs_N.detach()
        kl_scale = self.reference.kl_scale
        inputs = loss_inputs(
            prepared, logprobs_N, entropy_N, on_policy=step.on_policy, kl_scale=kl_scale, top_logprobs_NK1=top_NK1
        )
        token_loss = self.algorithm.loss(inputs)
        if found is not None:
            found.append(first_non_finite(inputs, token_loss, micro_batch))
        loss = (micro_batch.weights_N * token_loss.loss_N).sum() / step.denominator
        loss.backward()
        self.routers.add(routers, means)
        means.add({"entropy": entropy_N, **token_loss.metrics})
        return Accumulated(loss.detach(), count_non_finite(inputs, token_loss))

    # ------------------------------------------------------------ a step that was refused

    def _describe_failed_step(self, step: OptimizerStep, metrics: Mapping[str, float]) -> str:
        """Run the micro-batches of a failed step again, one by one, and name the first bad one and the bad tensor.

        `metrics`: `loss` and `grad_norm` of the failed step. All workers must call it; they get the same text.
        """
        (poisoned,) = self.peers.sum(self.poisoned.reshape(1), "non-finite numbers").tolist()
        summary = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        summary += f", tokens with non-finite activations: {int(poisoned)}"
        found = self.peers.agree(self._first_bad_micro_batch(step), "non-finite numbers")
        if found is None:
            count = step.num_micro_batches
            return f"{summary}: finite in each of {count} micro-batches, not in their sum; nothing was updated"
        return f"{summary}: {found}; nothing was updated, the weights are those of version {self.policy_version}"

    def agree(self, prepared: PreparedMicroBatch, error: str | None) -> str | None:
        """The first error of the workers that train on this micro-batch too."""
        return self.peers.agree_in_group(error, "non-finite numbers")

    def _first_bad_micro_batch(self, step: OptimizerStep) -> str | None:
        for index, prepared in enumerate(step.micro_batches):
            number: list[str | None] = []
            with self.optimizer.gradients.inspect() as bad:
                loss = float(self.backward(step, prepared, MetricMeans(), None, number).loss)
            of_gradients = f", first non-finite gradient '{bad[0]}' ({len(bad)} in all)" if bad else None
            of_gradients = self.agree(prepared, of_gradients)
            if of_gradients or number[0] or not math.isfinite(loss):
                where = f", {number[0]}" if number[0] else ""
                where += of_gradients or ""
                share = self.peers.worker
                at = f" of worker {share.rank}" if share.count > 1 else ""
                longest = prepared.micro_batch.max_seqlen
                return (
                    f"micro-batch {index + 1} of {len(step.micro_batches)}{at} (longest sequence {longest} tokens) has"
                    f" loss {loss}{where}"
                )
        return None
