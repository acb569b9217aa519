"""The trainer: a packed batch in, one update of the weights out.

One `train` call is `epochs` passes over `minibatches` optimizer steps. Each step:

    for each micro-batch:  hidden = model(tokens);  log-probs of the trained tokens;  algorithm.loss per token
                           sum(weights * loss) / denominator, backward          the only division in the project
    clip the global norm;  look whether all is finite;  AdamW;  quantise every FP8 weight once

Log-probs that must not move during the call come first, without gradient: the reference's where the algorithm has a KL
term, and the trainer's own (proximal) where there is more than one optimizer step. With one step and samples drawn by
these very weights, the ratio is exactly 1 and needs no second forward. An algorithm that shapes its advantages token by
token does so then, from the whole batch (algorithms/token_rewards.py).

The forward sees K and V as the rollout's cache did (`KVReplay`) and collects their amax on the way (numerics.md §5,
§6). The reference, which may be another model (a teacher), is run without replay of scales that are not its own.

T tokens and N trained tokens of a micro-batch, L layers, K KV heads, E hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.algorithms.corrections import effective_sample_size
from octetrl.algorithms.finite import count_non_finite, first_non_finite
from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import TrainerConfig
from octetrl.kernels.quantize.count_poisoned import count_poisoned
from octetrl.layers.context import KVMode, PackedContext
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch, PackedBatch, PolicyUpdate
from octetrl.trainer.activation_checkpoint import layer_runner
from octetrl.trainer.critic import Critic
from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.non_finite import NonFiniteError as NonFiniteError
from octetrl.trainer.optimizer import Optimizer, copy_all
from octetrl.trainer.packing import PackingLayout, pack_for_calibration
from octetrl.trainer.prepared import Prepared, fill_step_means, loss_inputs, shape_advantages
from octetrl.trainer.reference import Reference
from octetrl.trainer.scalar_trainer import on_device
from octetrl.trainer.schedule import learning_rate
from octetrl.trainer.token_logprobs import TokenLogprobs as TokenLogprobs
from octetrl.trainer.token_logprobs import token_logprobs

NEVER_OBSERVED = -1.0  # below any amax


@dataclass(frozen=True, slots=True)
class KVReplay:
    """The cache that the samples were drawn with. Scales are float32 [L, K], for "calibrated" only."""

    kv_mode: KVMode = "none"
    k_scale_LK: Tensor | None = None
    v_scale_LK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TrainerState:
    """All that a resumed trainer needs; live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    policy_version: int


@dataclass(frozen=True, slots=True)
class _Objective:
    """What one optimizer step minimises."""

    minibatch: Sequence[Prepared]
    kv: KVReplay
    on_policy: bool
    denominator: float


class _Share(NamedTuple):
    """What one micro-batch adds to an optimizer step; scalars on the device."""

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
        self.config, self.algorithm = config, algorithm
        self.temperature, self.total_steps = temperature, total_steps
        self.policy_version = 0
        self._is_stepping = False  # from the first optimizer step of a `train` call to its end
        self.last_logprobs: TokenLogprobs | None = None  # of the last `train`; None before it and for SFT
        self.device = model.lm_head_weight.device
        self.optimizer = Optimizer(model.trained_parameters() if trains else (), config.optimizer, seed=seed)
        self._run_layer = layer_runner(model, config.activation_checkpointing, config.checkpointed_layers)
        self._run_reference_layer = None if reference is None else layer_runner(reference, "none")
        self._remakes_codes = config.weight_codes == "remade"
        self._kv_amax_2LK: Tensor | None = None
        self._collects_in_training = collect_kv_amax
        self._poisoned = torch.zeros((), dtype=torch.int64, device=self.device)  # tokens, in all forwards of a `train`

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

    def train(self, batch: PackedBatch, kv: KVReplay, precision_digest: str | None) -> PolicyUpdate:
        """Learns from `batch`, whose samples were drawn with the cache `kv` under the table `precision_digest`.

        An empty batch changes nothing, the version included. Raises NonFiniteError naming the micro-batch, RuntimeError
        when the samples' precision table is not the trainer's.
        """
        self._check_digest(precision_digest)
        self.last_logprobs = None
        if not batch.minibatches:
            return PolicyUpdate(self.policy_version, {"train/skipped": 1.0})
        started = time.perf_counter()
        self._poisoned.zero_()
        if self._collects_in_training:
            self._kv_amax_2LK = self._unobserved()
        num_updates = self.config.epochs * len(batch.minibatches)
        on_policy = num_updates == 1 and batch.policy_version == self.policy_version
        lr = self._learning_rate()
        minibatches = [
            [self._prepare(micro_batch, kv, updates=0 if lr is None else num_updates) for micro_batch in minibatch]
            for minibatch in batch.minibatches
        ]
        means, updates = MetricMeans(), list[dict[str, float]]()
        before = self._before_updates(minibatches, on_policy, means)
        for _ in range(self.config.epochs):
            for minibatch, denominator in zip(minibatches, batch.loss_denominators, strict=True):
                objective = _Objective(minibatch, kv, on_policy, denominator)
                update = {} if lr is None else self._update(objective, lr, means)
                if self.critic is not None:
                    update |= self.critic.update(minibatch, denominator, self.policy_version, means)
                updates.append(update)
        self.last_logprobs = token_logprobs(minibatches)
        self._finish()
        metrics = {name: sum(update[name] for update in updates) / num_updates for name in updates[0]}
        metrics |= before | means.read()
        metrics |= effective_sample_size(metrics)
        metrics |= self.reference.follow(self.model, self.policy_version, None if lr is None else metrics.get("kl"))
        tokens = sum(m.token_ids_T.numel() for minibatch in batch.minibatches for m in minibatch)
        if lr is not None:
            metrics["time/requantize"] *= num_updates
        metrics["lr"] = lr or 0.0
        metrics["train/updates"] = float(num_updates)
        metrics["train/non_finite_tokens"] = float(self._poisoned)
        metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - started)
        return PolicyUpdate(self.policy_version, metrics)

    def accumulate(self, batch: PackedBatch, kv: KVReplay, *, collect_kv_amax: bool = False) -> Tensor:
        """Adds the on-policy gradient of every micro-batch and updates nothing; returns the loss, on the device. What
        `train` does but for the update, for benchmarks. K and V can be observed where `train` would observe them. Codes
        that are `remade` come back with the model's `requantize`."""
        assert self._collects_in_training or not collect_kv_amax, "built with collect_kv_amax=False"
        self._kv_amax_2LK = self._unobserved() if collect_kv_amax else None
        if self._remakes_codes:
            self.model.release_codes()
        loss = torch.zeros((), device=self.device)
        for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True):
            prepared = [Prepared(on_device(micro_batch, self.device)) for micro_batch in minibatch]
            objective = _Objective(prepared, kv, on_policy=True, denominator=denominator)
            for one in prepared:
                loss += self._backward(objective, one, MetricMeans()).loss
        return loss

    def collect_kv_amax(self, tokens: PackedBatch | Sequence[Sequence[int]]) -> None:
        """A forward alone, with the present weights and no replay, that observes K and V: for the first step's prompts
        and for `calibration: exact`. What it saw comes out of `take_kv_amax`."""
        if isinstance(tokens, PackedBatch):
            micro_batches: Sequence[MicroBatch] = [m for minibatch in tokens.minibatches for m in minibatch]
        else:
            micro_batches = pack_for_calibration(tokens, self.layout)
        self._kv_amax_2LK = self._unobserved()
        with torch.no_grad():
            for micro_batch in micro_batches:
                self._hidden(self.model, on_device(micro_batch, self.device), KVReplay(), self._kv_amax_2LK)

    def take_kv_amax(self) -> Tensor | None:
        """max|K| and max|V|, float32 [2, L, K] on the device, since the last take; None when nothing was observed. A
        head that saw no token holds NEVER_OBSERVED."""
        taken, self._kv_amax_2LK = self._kv_amax_2LK, None
        return taken

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

    def _finish(self) -> None:
        """The weights are those of a new version."""
        self.policy_version += 1
        self._is_stepping = False
        if self.critic is not None:
            self.critic.finish()

    def _prepare(self, micro_batch: MicroBatch, kv: KVReplay, *, updates: int) -> Prepared:
        """`updates` 0: only the critic's follow, and K and V are observed here."""
        micro_batch = on_device(micro_batch, self.device)
        prepared = Prepared(micro_batch)
        with torch.no_grad():
            if self.reference.model is not None:
                reference = self.reference.model
                seen = kv if self.reference.replays(kv.kv_mode) else KVReplay()
                hidden_NE = self._predictors(reference, micro_batch, seen)
                prepared.reference_N, _ = self._logprobs_of(reference, hidden_NE, micro_batch)
                if self.algorithm.teacher_top_k:
                    prepared.teacher_ids_NK, prepared.teacher_top_NK = self._top_logprobs(reference, hidden_NE)
            needs_proximal = self.algorithm.needs_proximal and updates > 1
            shapes_with_kl = self.algorithm.shape is not None and self.reference.model is not None
            if needs_proximal or shapes_with_kl or self.algorithm.step_means or not updates:
                observed = self._kv_amax_2LK if self._collects_in_training and not updates else None
                prepared.first_N, _ = self._logprobs(self.model, micro_batch, kv, observed)
                prepared.proximal_N = prepared.first_N if needs_proximal else None
        return prepared

    def _before_updates(
        self, minibatches: Sequence[Sequence[Prepared]], on_policy: bool, means: MetricMeans
    ) -> dict[str, float]:
        """What is made of the whole batch, or of a whole optimizer step, before the first update; its metrics. Those of
        tokens go to `means`."""
        metrics: dict[str, float] = {}
        prepared = [one for minibatch in minibatches for one in minibatch]
        if self.critic is not None and self.algorithm.returns is not None:
            metrics |= self.critic.prepare(prepared, self.algorithm.returns, self.reference.kl_scale)
        if self.algorithm.shape is not None:
            log_ratio_N = shape_advantages(self.algorithm.shape, prepared, self.reference.kl_scale)
            if self.algorithm.shaping_kl is not None and log_ratio_N is not None:
                means.add({"kl": self.algorithm.shaping_kl(log_ratio_N)})
        for minibatch in minibatches:
            fill_step_means(self.algorithm.step_means, minibatch, on_policy)
        return metrics

    def _update(self, objective: _Objective, lr: float, means: MetricMeans) -> dict[str, float]:
        """One optimizer step; returns its loss, gradient norm and time, and adds the metrics of tokens to `means`."""
        with self.model.codes_released() if self._remakes_codes else nullcontext():
            return self._step(objective, lr, means)

    def _step(self, objective: _Objective, lr: float, means: MetricMeans) -> dict[str, float]:
        self.optimizer.zero_grad()
        shares = [self._backward(objective, prepared, means) for prepared in objective.minibatch]
        loss, non_finite = (sum(parts, start=torch.zeros_like(parts[0])) for parts in zip(*shares, strict=True))
        totals = {"loss": loss, "grad_norm": self.optimizer.clip_gradients(), "non_finite": non_finite}
        metrics = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
        if metrics.pop("non_finite") or not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise NonFiniteError(self._blame(objective, metrics))
        self._is_stepping = True
        self.optimizer.step(lr)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self.model.requantize()
        metrics["time/requantize"] = time.perf_counter() - started
        return metrics

    def _backward(
        self, objective: _Objective, prepared: Prepared, means: MetricMeans, found: list[str | None] | None = None
    ) -> _Share:
        """Adds one micro-batch's gradient; returns its share of the loss. `means` gets its metrics, `found` the first
        number that is not finite, in words."""
        micro_batch = prepared.micro_batch
        hidden_NE = self._predictors(
            self.model, micro_batch, objective.kv, self._kv_amax_2LK if self._collects_in_training else None
        )
        logprobs_N, entropy_N = self._logprobs_of(self.model, hidden_NE, micro_batch)
        ids_NK, chunk = prepared.teacher_ids_NK, self.config.logprob_chunk
        top_NK = None if ids_NK is None else self.model.logprobs_at(hidden_NE, ids_NK, self.temperature, chunk)
        if prepared.first_N is None and not self._is_stepping:
            prepared.first_N = logprobs_N.detach()
        kl_scale = self.reference.kl_scale
        inputs = loss_inputs(
            prepared, logprobs_N, entropy_N, on_policy=objective.on_policy, kl_scale=kl_scale, top_logprobs_NK=top_NK
        )
        token_loss = self.algorithm.loss(inputs)
        if found is not None:
            found.append(first_non_finite(inputs, token_loss, micro_batch))
        loss = (micro_batch.weights_N * token_loss.loss_N).sum() / objective.denominator
        loss.backward()
        means.add({"entropy": entropy_N, **token_loss.metrics})
        return _Share(loss.detach(), count_non_finite(inputs, token_loss))

    def _blame(self, objective: _Objective, metrics: Mapping[str, float]) -> str:
        """Runs the micro-batches of a failed step again, one by one, to name the one and the tensor."""
        found = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        found += f", tokens with non-finite activations: {int(self._poisoned)}"
        count = len(objective.minibatch)
        for index, prepared in enumerate(objective.minibatch):
            self.optimizer.zero_grad()
            number: list[str | None] = []
            loss = float(self._backward(objective, prepared, MetricMeans(), number).loss)
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

    def _logprobs(
        self, model: Decoder, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the trained tokens, float32 [N]."""
        return self._logprobs_of(model, self._predictors(model, micro_batch, kv, kv_amax_2LK), micro_batch)

    def _logprobs_of(self, model: Decoder, hidden_NE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return model.logprobs(hidden_NE, micro_batch.targets_N, self.temperature, self.config.logprob_chunk)

    def _top_logprobs(self, teacher: Decoder, hidden_NE: Tensor) -> tuple[Tensor, Tensor]:
        k, below = self.algorithm.teacher_top_k, self.model.spec.vocab_size
        return teacher.top_logprobs(hidden_NE, k, below, self.temperature, self.config.logprob_chunk)

    def _predictors(
        self, model: Decoder, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None = None
    ) -> Tensor:
        """Hidden states [N, E] that the trained tokens are predicted from."""
        return self._hidden(model, micro_batch, kv, kv_amax_2LK).index_select(0, micro_batch.predictor_N)

    def _hidden(self, model: Decoder, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None) -> Tensor:
        context = PackedContext(
            cu_seqlens_B1=micro_batch.cu_seqlens_B1,
            max_seqlen=micro_batch.max_seqlen,
            kv_mode=kv.kv_mode,
            k_scale_LK=kv.k_scale_LK,
            v_scale_LK=kv.v_scale_LK,
            kv_amax_2LK=kv_amax_2LK,
        )
        run_layer = self._run_reference_layer if model is self.reference.model else self._run_layer
        hidden_TE: Tensor = model(micro_batch.token_ids_T, micro_batch.positions_T, context, run_layer)
        count_poisoned(hidden_TE.detach(), self._poisoned)
        return hidden_TE

    def _unobserved(self) -> Tensor:
        spec = self.model.spec
        shape = (2, spec.num_layers, spec.num_kv_heads)
        return torch.full(shape, NEVER_OBSERVED, dtype=torch.float32, device=self.device)
