"""Training on micro-batches that several workers share (`cluster.context_parallel`, docs/scale.md).

workers/assignment.py decides which workers share one; `MicroBatch.shared` has their ranks and what each has. A worker
runs the layers on its own tokens, and in attention on all tokens of its heads (layers/token_group.py). Log-probs are
gathered, so each of them computes the whole loss, and propagates it back to its own tokens. Its gradients of weights
are then a part, which is added over all workers as always. The first of them reports loss and metrics.

All workers run shared micro-batches in one order, before their own ones. So no two groups wait for each other.

t tokens of this worker, n its trained tokens, N of the micro-batch, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octetrl.config.schema import TrainerConfig
from octetrl.layers.context import RouterRecord
from octetrl.layers.token_group import TokenGroup
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch, PackedBatch, SharedBy
from octetrl.trainer.forward import Forward, KVReplay
from octetrl.trainer.peers import ProcessGroupPeers
from octetrl.trainer.prepared import Accumulated, MetricMeans, OptimizerStep, PreparedMicroBatch, TrainCall
from octetrl.trainer.shards import Share
from octetrl.trainer.tensor_peers import ExchangePeers
from octetrl.trainer.trainer import Trainer


class Groups:
    """The groups of workers that this one shares micro-batches with, each connected when it is first needed."""

    def __init__(self, peers: ProcessGroupPeers) -> None:
        self._peers = peers
        self._connected: dict[tuple[int, int], ExchangePeers] = {}

    def of(self, shared: SharedBy) -> TokenGroup:
        first, size = shared.first, len(shared.rows) - 1
        if (first, size) not in self._connected:
            store, device, seconds = self._peers.connection
            share, name = Share(self._peers.share.rank - first, size), f"context {first} to {first + size}"
            self._connected[first, size] = ExchangePeers(store, share, device, deadline_seconds=seconds, name=name)
        return TokenGroup(self._connected[first, size], shared.rows)


class ContextForward(Forward):
    """Forwards of own tokens. Log-probs are those of all trained tokens."""

    def __init__(self, groups: Groups, *arguments: Any, **settings: Any) -> None:
        """The other arguments are those of `Forward`."""
        super().__init__(*arguments, **settings)
        self.groups = groups

    def hidden(
        self,
        micro_batch: MicroBatch,
        kv: KVReplay,
        kv_amax_LS: Tensor | None = None,
        routers: RouterRecord | None = None,
        group: TokenGroup | None = None,
    ) -> Tensor:
        """Hidden states [t, E]."""
        if micro_batch.shared is not None:
            group = self.groups.of(micro_batch.shared)
            token_ids_t, positions_t = micro_batch.token_ids_T[group.own_rows], micro_batch.positions_T[group.own_rows]
            micro_batch = replace(micro_batch, token_ids_T=token_ids_t, positions_T=positions_t)
            if routers is not None:
                routers.group = group
        return super().hidden(micro_batch, kv, kv_amax_LS, routers, group)

    def predictors(self, micro_batch: MicroBatch, *given: Any, **named: Any) -> Tensor:
        """Hidden states [n, E]; of a worker without trained tokens one row, from which nothing is predicted."""
        if micro_batch.shared is None:
            return super().predictors(micro_batch, *given, **named)
        hidden_tE = self.hidden(micro_batch, *given, **named)
        group, (start, stop) = self.groups.of(micro_batch.shared), self._trained(micro_batch.shared)
        if start == stop:
            return hidden_tE[:1]
        return hidden_tE.index_select(0, micro_batch.predictor_N[start:stop] - group.own_rows.start)

    def logprobs_of(self, hidden_NE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        shared = micro_batch.shared
        if shared is None:
            return super().logprobs_of(hidden_NE, micro_batch)
        start, stop = self._trained(shared)
        rows = slice(start, stop) if start < stop else slice(0, 1)
        temperatures_N = micro_batch.temperatures_N
        own = replace(
            micro_batch,
            targets_N=micro_batch.targets_N[rows],
            temperatures_N=None if temperatures_N is None else temperatures_N[rows],
        )
        both_n2 = torch.stack(super().logprobs_of(hidden_NE, own), 1)[: stop - start]
        both_N2: Tensor = _Joined.apply(both_n2, self.groups.of(shared), shared.trained)
        return both_N2[:, 0], both_N2[:, 1]

    def _trained(self, shared: SharedBy) -> tuple[int, int]:
        rank = self.groups.of(shared).workers.rank
        return shared.trained[rank], shared.trained[rank + 1]


class _Joined(torch.autograd.Function):
    """The rows of all workers; the gradient is that of own rows."""

    @staticmethod
    def forward(ctx: Any, x_n: Tensor, group: TokenGroup, bounds: tuple[int, ...]) -> Tensor:
        ctx.own = slice(*bounds[group.workers.rank :][:2])
        return group.join(x_n, [stop - start for start, stop in pairwise(bounds)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None


class ContextTrainer(Trainer):
    """The trainer of one of several workers that may share micro-batches."""

    def __init__(self, model: Decoder, *, config: TrainerConfig, temperature: float, **settings: Any) -> None:
        super().__init__(model, config=config, temperature=temperature, **settings)
        assert isinstance(self.peers, ProcessGroupPeers), "one worker shares nothing"
        self._groups = Groups(self.peers)
        given = self._groups, model, config, temperature, self.poisoned
        self.forward = ContextForward(*given)
        if self.reference.model is not None:
            self.reference_forward = ContextForward(*given[:1], self.reference.model, *given[2:], is_trained=False)

    def prepare(self, batch: PackedBatch, kv: KVReplay) -> TrainCall:
        call = super().prepare(batch, kv)
        reported = [sum(one.reports for one in minibatch) for minibatch in batch.minibatches]
        of_workers = self.peers.gather_records(reported, "micro-batches")
        counts = map(sum, zip(*of_workers, strict=True))
        call.steps = tuple(
            replace(step, num_micro_batches=count) for step, count in zip(call.steps, counts, strict=True)
        )
        return call

    def shape(self, call: TrainCall) -> None:
        super().shape(call)
        if self.algorithm.shape is None:
            return
        for prepared in (one for step in call.steps for one in step.micro_batches):
            micro_batch = prepared.micro_batch
            if micro_batch.shared is not None:  # only the first has shaped them
                counts = [len(micro_batch.targets_N), *[0] * (len(micro_batch.shared.rows) - 2)]
                given_N = micro_batch.advantages_N[: None if micro_batch.reports else 0]
                advantages_N = self._groups.of(micro_batch.shared).join(given_N, counts)
                prepared.micro_batch = replace(micro_batch, advantages_N=advantages_N)

    def backward(
        self, step: OptimizerStep, prepared: PreparedMicroBatch, means: MetricMeans, *given: Any, **named: Any
    ) -> Accumulated:
        reports = prepared.micro_batch.reports
        accumulated = super().backward(step, prepared, means if reports else _OfRouters(means), *given, **named)
        return accumulated if reports else Accumulated(*map(torch.zeros_like, accumulated))

    def agree(self, prepared: PreparedMicroBatch, error: str | None) -> str | None:
        shared = prepared.micro_batch.shared
        return error if shared is None else self._groups.of(shared).workers.agree(error, "non-finite numbers")


class _OfRouters(MetricMeans):
    """Adds only metrics of own tokens: those of the trained tokens count on another worker."""

    def __init__(self, means: MetricMeans) -> None:
        self._means = means

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        self._means.add({name: values_I for name, values_I in metrics.items() if name.startswith("router/")})
