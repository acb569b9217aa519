"""One optimizer step whose micro-batches arrive in parts, while further rollouts are still sampled.

    add       some micro-batches: reference log-probs, forward, backward into the gradient sums; without other workers
    finish    all workers together: scale the sums, one update, metrics

The loss's denominator is known when the last rollout has ended. Until then the loss is divided by a `divisor` that is
known before the step. `finish` multiplies the gradient sums by the quotient divisor / denominator. Where it is a power
of two, such as 1, the step has the bits of `Trainer.train` with the same micro-batches in the same order. With another
quotient every value of the backward is rounded at another place between two powers of two: gradients in BF16, and codes
and scales in FP8. The difference has the size of the backward's own roundings and no bias (docs/scale.md).

Only for objectives that need nothing of the whole batch before a backward (config/rules_running.py).

L layers, S scales of a layer's cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from octetrl.records import MicroBatch, PackedBatch, PolicyUpdate
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.optimizer import place_of
from octetrl.trainer.prepared import Accumulated, OptimizerStep, PreparedMicroBatch, TrainCall, check_digest
from octetrl.trainer.trainer import Trainer


class StreamedStep:
    """The step of one worker. `kv`: the cache of its samples. `on_policy`: the current weights sampled them."""

    def __init__(self, trainer: Trainer, kv: KVReplay, divisor: float, *, lr: float | None, on_policy: bool) -> None:
        assert trainer.config.epochs == trainer.config.minibatches == 1, "one update a step"
        assert trainer.algorithm.shape is None and not trainer.algorithm.step_means, "the batch is needed as a whole"
        assert trainer.critic is None and not trainer.remakes_codes, "refused by `tail_problems`"
        self._trainer, self._divisor = trainer, divisor
        trainer.poisoned.zero_()
        trainer.routers.begin_call()
        trainer.optimizer.zero_grad()
        self._prepared: list[PreparedMicroBatch] = []
        self._step = OptimizerStep(self._prepared, kv, on_policy, divisor, num_micro_batches=1, most_micro_batches=1)
        amax_LS = trainer.forward.unobserved_amax() if trainer.collects_kv_amax else None
        assert lr is not None, "only a critic is trained without the policy"
        self._lr, self._call = lr, TrainCall((self._step,), 1, lr, amax_LS, time.perf_counter())
        zero = torch.zeros((), device=trainer.device)
        self._sums = Accumulated(zero, zero)

    def add(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add their gradients to the sums."""
        trainer, step, call = self._trainer, self._step, self._call
        for micro_batch in micro_batches:
            prepared = trainer.first_passes(micro_batch, step.kv, call.kv_amax_LS, updates=1)
            self._prepared.append(prepared)
            part = trainer.backward(step, prepared, call.means, call.kv_amax_LS)
            trainer.optimizer.gradients.end_micro_batch()
            self._sums = Accumulated(self._sums.loss + part.loss, self._sums.non_finite + part.non_finite)

    def finish(self, denominator: float) -> PolicyUpdate:
        """One update with the micro-batches of all workers. NonFiniteError: as in `Trainer.update`."""
        trainer, call = self._trainer, self._call
        counts = [int(count) for count in trainer.peers.gather_records(len(self._prepared), "micro-batches")]
        step = replace(
            self._step, denominator=denominator, num_micro_batches=sum(counts), most_micro_batches=max(counts)
        )
        factor = self._divisor / denominator
        if factor != 1.0:
            trainer.optimizer.gradients.scale(factor)
            self._sums = self._sums._replace(loss=self._sums.loss * factor)
        call.steps = (step,)
        call.updates.append(trainer.update(step, self._sums, self._lr))
        return trainer.finish(call)


class StreamedCall:
    """In place of one `Trainer.train`: `add` takes parts of its batch, and `finish` the whole batch of this worker."""

    def __init__(self, trainer: Trainer, divisor: float) -> None:
        self._trainer, self._divisor = trainer, divisor
        self._step: StreamedStep | None = None
        self.micro_batches: list[MicroBatch] = []  # of this worker, in the order of their backward

    def add(self, part: PackedBatch, kv: KVReplay, precision_digest: str | None) -> None:
        """The micro-batches of `part` with the cache of its samples, as in `Trainer.train`."""
        check_digest(precision_digest, self._trainer.model.policy.digest)
        (micro_batches,) = part.minibatches
        self._begun(part, kv).add(micro_batches)
        self.micro_batches += micro_batches

    def finish(self, whole: PackedBatch, kv: KVReplay, precision_digest: str | None) -> PolicyUpdate:
        """The update. `whole`: all parts, with the denominator of all workers' batch."""
        check_digest(precision_digest, self._trainer.model.policy.digest)
        (denominator,) = whole.loss_denominators
        return self._begun(whole, kv).finish(denominator)

    def _begun(self, batch: PackedBatch, kv: KVReplay) -> StreamedStep:
        if self._step is None:
            on_policy = batch.policy_version == self._trainer.policy_version
            lr = self._trainer.learning_rate(place_of(batch, self._trainer.policy_version))
            self._step = StreamedStep(self._trainer, kv, self._divisor, lr=lr, on_policy=on_policy)
        return self._step
