"""Micro-batches with what is computed for them once, before the first update; and the advantages computed from that.

N trained tokens, K tokens of a teacher.

**Metric means.** Means of the metrics of one `train` call, each over its own items.

An item is a trained token or a preference pair. Every item of the call counts once, in whatever micro-batch, minibatch
or epoch it was. Token weights do not enter: they belong to the loss, and a weighted mean would change with
`algorithm.token_weighting`.

I items of one metric in one micro-batch.

**Train call.** The records of one call of `Trainer.train`: its optimizer steps and their sums; and the trainer's state.

L layers, K KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octetrl.algorithms.sequences import last_of_each
from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.records import MicroBatch, TokenLogprobs
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.peers import ALONE, Peers


@dataclass(slots=True)
class PreparedMicroBatch:
    """A micro-batch on the device, with the tensors that stay constant during a `train` call."""

    micro_batch: MicroBatch
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    first_N: Tensor | None = None  # the trainer's, before any update; None until they are first computed
    values_N: Tensor | None = None  # the critic's, before any update
    after_N: Tensor | None = None  # the critic's after a sample that was cut off, on its last token; 0 elsewhere
    returns_N: Tensor | None = None  # the critic's targets
    step_means: dict[str, Tensor] = field(default_factory=dict)  # over its optimizer step, by field of LossInputs
    teacher_ids_NK: Tensor | None = None  # the teacher's likeliest tokens
    teacher_top_NK1: Tensor | None = None  # their log-probs, and that of all other tokens


def loss_inputs(
    prepared: PreparedMicroBatch,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    *,
    on_policy: bool,
    kl_scale: float,
    top_logprobs_NK1: Tensor | None = None,
) -> LossInputs:
    """The inputs of the algorithm's loss. `logprobs_N`, `entropy_N`: float32 [N], with gradient."""
    micro_batch = prepared.micro_batch
    return LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        advantages_N=micro_batch.advantages_N,
        sequence_N=micro_batch.sequence_N,
        num_sequences=num_sequences_of(micro_batch),
        generator_logprobs_N=micro_batch.generator_logprobs_N,
        proximal_logprobs_N=prepared.proximal_N,
        reference_logprobs_N=prepared.reference_N,
        chosen_N=micro_batch.chosen_N,
        teacher_top_logprobs_NK1=prepared.teacher_top_NK1,
        top_logprobs_NK1=top_logprobs_NK1,
        mean_weight=prepared.step_means.get("mean_weight"),
        kept_share=prepared.step_means.get("kept_share"),
        kl_scale=kl_scale,
        on_policy=on_policy,
    )


def fill_step_means(
    values_of: Mapping[str, Callable[[LossInputs], Tensor]],
    minibatch: Sequence[PreparedMicroBatch],
    on_policy: bool,
    peers: Peers = ALONE,
) -> None:
    """Fill in `step_means`: means over one optimizer step of all workers, with the token weights of the loss."""
    for name, values in values_of.items():
        total = torch.zeros((), device=minibatch[0].micro_batch.weights_N.device if minibatch else None)
        counted = [one for one in minibatch if one.micro_batch.reports]
        for one in counted:
            assert one.first_N is not None, "step means need the log-probs before the update"
            inputs = loss_inputs(one, one.first_N, one.first_N, on_policy=on_policy, kl_scale=1.0)
            total += (one.micro_batch.weights_N * values(inputs)).sum()
        weight = sum(float(one.micro_batch.weights_N.sum()) for one in counted)
        if peers.share.count > 1:
            both = peers.sum(torch.tensor([float(total), weight]), "step means")
            total, weight = both[0].float().to(total.device), float(both[1])
        mean = total / weight
        for one in minibatch:
            one.step_means[name] = torch.where(mean > 0, mean, 1.0)  # if all tokens are masked: no division by 0


def shape_advantages(
    shape: Callable[[TokenRewards], Tensor],
    prepared: Sequence[PreparedMicroBatch],
    kl_scale: float = 1.0,
    peers: Peers = ALONE,
) -> Tensor | None:
    """Replace the advantages of this worker's micro-batches of one `train` call by the result of `shape`.

    `shape` gets the tokens of all workers. Returns log p - log reference of each token of this worker, float32 [N];
    None without a reference.
    """
    counts = [one.micro_batch.sequence_N.numel() for one in prepared]
    rewards, own = gathered_rewards(prepared, peers)
    rewards = replace(rewards, kl_scale=kl_scale)
    shaped_N = shape(rewards)
    assert shaped_N.shape == rewards.outcome_N.shape, f"{tuple(shaped_N.shape)} for {tuple(rewards.outcome_N.shape)}"
    for one, advantages_N in zip(prepared, shaped_N[own].float().split(counts), strict=True):
        one.micro_batch = replace(one.micro_batch, advantages_N=advantages_N)
    return None if rewards.kl_N is None else rewards.kl_N[own]


def gathered_rewards(prepared: Sequence[PreparedMicroBatch], peers: Peers) -> tuple[TokenRewards, slice]:
    """The rewards of all workers' tokens, in the order of ranks, and where this worker's are among them."""
    own = token_rewards(prepared)
    if peers.share.count == 1:
        return own, slice(None)
    phase = "rewards of the whole batch"
    counts = peers.gather(torch.tensor([own.outcome_N.numel(), own.num_sequences]), phase)
    first = sum(int(one[0]) for one in counts[: peers.share.rank])
    sequences = sum(int(one[1]) for one in counts[: peers.share.rank])

    def joined(values_N: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """None if no worker has values. A worker without tokens has none either."""
        given_N = torch.empty(0, dtype=dtype, device=own.outcome_N.device) if values_N is None else values_N.to(dtype)
        whole_N = torch.cat(peers.gather(given_N, phase))
        return whole_N if whole_N.numel() else None

    outcome_N, sequence_N = joined(own.outcome_N, torch.float32), joined(own.sequence_N + sequences, torch.int64)
    is_last_N = joined(own.is_last_N, torch.bool)
    assert outcome_N is not None and sequence_N is not None and is_last_N is not None, "a batch without trained tokens"
    whole = TokenRewards(
        outcome_N=outcome_N,
        sequence_N=sequence_N,
        num_sequences=sum(int(one[1]) for one in counts),
        is_last_N=is_last_N,
        kl_N=joined(own.kl_N, torch.float32),
        values_N=joined(own.values_N, torch.float32),
        after_N=joined(own.after_N, torch.float32),
        group_N=joined(own.group_N, torch.int64),
    )
    return whole, slice(first, first + own.outcome_N.numel())


def token_rewards(prepared: Sequence[PreparedMicroBatch]) -> TokenRewards:
    """The rewards of all trained tokens of these micro-batches, in their order."""
    sequences, num_sequences = [], 0
    for one in prepared:
        sequences.append(one.micro_batch.sequence_N + num_sequences)
        num_sequences += num_sequences_of(one.micro_batch)
    sequence_N = torch.cat(sequences) if sequences else torch.empty(0, dtype=torch.int64)
    first_N = _joined([one.first_N for one in prepared])
    reference_N = _joined([one.reference_N for one in prepared])
    return TokenRewards(
        outcome_N=torch.cat([one.micro_batch.advantages_N for one in prepared]) if prepared else torch.empty(0),
        sequence_N=sequence_N,
        num_sequences=num_sequences,
        is_last_N=last_of_each(sequence_N),
        kl_N=None if first_N is None or reference_N is None else first_N - reference_N,
        values_N=_joined([one.values_N for one in prepared]),
        after_N=_joined([one.after_N for one in prepared]),
        group_N=_joined([one.micro_batch.group_N for one in prepared]),
    )


def token_logprobs(prepared: Sequence[PreparedMicroBatch], peers: Peers = ALONE) -> TokenLogprobs | None:
    """Log-probs of all workers' trained tokens by engine and trainer, for telemetry; None if no engine drew them.

    Micro-batches whose log-probs were not computed before the first update are left out.
    """
    seen = [one for one in prepared if one.first_N is not None]
    seen = [one for one in seen if one.micro_batch.generator_logprobs_N is not None]

    def joined(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        own = [part.cpu().to(dtype) for part in parts if part is not None]
        own_N = torch.cat(own) if own else torch.empty(0, dtype=dtype)
        return torch.cat(peers.gather(own_N, "log-probs"))

    versions_N = joined([one.micro_batch.versions_N for one in seen], torch.int64)
    logprobs = TokenLogprobs(
        generator_N=joined([one.micro_batch.generator_logprobs_N for one in seen], torch.float32),
        trainer_N=joined([one.first_N for one in seen], torch.float32),
        target_positions_N=joined([one.micro_batch.target_positions_N for one in seen], torch.int64),
        sequence_lengths_N=joined([one.micro_batch.sequence_lengths_N for one in seen], torch.int64),
        versions_N=versions_N if versions_N.numel() else None,
    )
    return logprobs if logprobs.generator_N.numel() else None


def on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with all its tensors on `device`."""
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(micro_batch, **moved)


def num_sequences_of(micro_batch: MicroBatch) -> int:
    return micro_batch.cu_seqlens_B1.numel() - 1


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    assert len(given) in (0, len(parts)), "some micro-batches were prepared and others not"
    return torch.cat(given) if given else None


class MetricMeans:
    """Sums of metrics. They stay on the device, in float64, until `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._items: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the values [I] of each metric, from one micro-batch."""
        for name, values_I in metrics.items():
            total = values_I.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._items[name] = self._items.get(name, 0) + values_I.numel()

    def read(self, peers: Peers = ALONE) -> dict[str, float]:
        """The mean of each metric over all workers. One transfer from the device."""
        totals = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        own = {name: (total, self._items[name]) for name, total in zip(self._sums, totals, strict=True)}
        sums, items = dict[str, float](), dict[str, int]()
        for record in peers.gather_records(own, "metrics"):
            for name, (total, count) in record.items():
                sums[name] = sums[name] + total if name in sums else total
                items[name] = items.get(name, 0) + count
        return {name: total / items[name] for name, total in sums.items()}


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The micro-batches of one optimizer step, and how their loss is computed."""

    micro_batches: Sequence[PreparedMicroBatch]  # of this worker
    kv: KVReplay
    on_policy: bool  # sampled with the current weights, and this is the only update
    denominator: float  # of the loss, from the counts of the whole step
    num_micro_batches: int  # of all workers
    most_micro_batches: int  # of one worker


@dataclass(slots=True)
class TrainCall:
    """One call of `train`, from `prepare` to `finish`."""

    steps: tuple[OptimizerStep, ...]  # of one epoch
    epochs: int
    lr: float | None  # None: only the critic is trained
    kv_amax_LS: Tensor | None  # raised by the forwards; None: not collected
    started: float  # seconds of time.perf_counter
    place: int = 0  # steps of the run before this one
    means: MetricMeans = field(default_factory=MetricMeans)
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole batch, before the first update
    updates: list[dict[str, float]] = field(default_factory=list)  # of each optimizer step

    @property
    def micro_batches(self) -> Iterator[PreparedMicroBatch]:
        return (one for step in self.steps for one in step.micro_batches if one.micro_batch.reports)


class Accumulated(NamedTuple):
    """Sums over micro-batches of an optimizer step: float32 scalars on the device."""

    loss: Tensor
    non_finite: Tensor  # count of numbers that are not finite


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The complete state of the trainer. Live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    policy_version: int


def check_digest(precision_digest: str | None, own: str) -> None:
    """Raise RuntimeError if the samples' precision table is not the trainer's `own`."""
    if precision_digest is not None and precision_digest != own:
        raise RuntimeError(
            f"the samples were drawn under precision table {precision_digest}, the trainer's is {own}:"
            f" build engine and trainer from one policy"
        )
