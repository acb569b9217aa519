"""The routers of a mixture of experts in training: their metrics, their losses, the update of correction biases.

    router/load_max_over_mean   rows of the fullest expert over the mean, mean over layers; 1 is a balanced load
    router/idle_experts         experts without a row in the whole step, summed over layers
    router/entropy              of the normalised scores, mean over tokens and layers; log(X) if all are equal

A correction bias has no gradient. After each optimizer step it moves by `trainer.router.bias_rate`: up for experts with
less than the mean load, down for those with more (arXiv:2408.15664).

Legend: X experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octetrl.config.schema import RouterConfig
from octetrl.layers.context import RouterRecord
from octetrl.models.blocks.moe.module import MixtureOfExperts
from octetrl.models.decoder import Decoder
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import MetricMeans, OptimizerStep


class Routers:
    """The routers of one model: their metrics, records and correction biases. A model without a mixture has no metrics
    and no records."""

    def __init__(self, model: Decoder, config: RouterConfig, peers: Peers = ALONE) -> None:
        self.config, self._peers = config, peers
        self._mixtures = dict(_mixtures(model))
        self._of_call: dict[int, Tensor] = {}  # loads by layer, int64 [X]
        self._of_step: dict[int, Tensor] = {}

    def begin_call(self) -> None:
        self._of_call, self._of_step = {}, {}

    def record(self, step: OptimizerStep) -> RouterRecord | None:
        """For the forward of one of the step's micro-batches."""
        if not self._mixtures:
            return None
        return RouterRecord(self.config.balance_loss, self.config.z_loss, 1 / step.num_micro_batches)

    def add(self, record: RouterRecord | None, means: MetricMeans) -> None:
        """What the micro-batch's forward and backward have recorded."""
        if record is None:
            return
        means.add({"router/entropy": torch.cat(list(record.entropies.values()))})
        for layer, load_X in record.loads.items():
            self._of_step[layer] = self._of_step[layer] + load_X if layer in self._of_step else load_X

    @torch.no_grad()
    def finish_step(self) -> None:
        """Moves the correction biases, by the loads of all workers. Call it after the optimizer."""
        for layer, load_X in self._loads_of_all().items():
            self._of_call[layer] = self._of_call[layer] + load_X if layer in self._of_call else load_X
            bias_X = self._mixtures[layer].gate.e_score_correction_bias
            if self.config.bias_rate and bias_X is not None:
                below_X = load_X.double().mean() - load_X
                bias_X.add_(self.config.bias_rate * torch.sign(below_X).float())
        self._of_step = {}

    def _loads_of_all(self) -> dict[int, Tensor]:
        """The step's counts of all workers. A worker without a micro-batch adds zeros."""
        if self._peers.share.count == 1 or not self._mixtures:
            return self._of_step
        device = next(iter(self._mixtures.values())).gate.weight.device
        counts = [mixture.num_experts for mixture in self._mixtures.values()]
        own = [
            self._of_step.get(layer, torch.zeros(count, dtype=torch.int32, device=device))
            for layer, count in zip(self._mixtures, counts, strict=True)
        ]
        sums = self._peers.sum(torch.cat(own), "loads of experts").long()
        return dict(zip(self._mixtures, sums.split(counts), strict=True))

    def metrics(self) -> dict[str, float]:
        """The call's loads."""
        if not self._of_call:
            return {}
        load_LX = torch.stack(list(self._of_call.values())).double()
        fullest_L = load_LX.amax(1) / load_LX.mean(1)
        found = torch.stack([fullest_L.mean(), (load_LX == 0).sum().double()]).tolist()
        return dict(zip(("router/load_max_over_mean", "router/idle_experts"), found, strict=True))


def _mixtures(model: Decoder) -> Iterator[tuple[int, MixtureOfExperts]]:
    for layer in model.decoder_layers():
        if isinstance(layer.mlp, MixtureOfExperts):
            yield layer.index, layer.mlp
