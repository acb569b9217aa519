"""The trainer's forward passes: hidden states and log-probs of a micro-batch, by the policy or its reference.

The policy sees what its blocks cache, such as K and V, as the rollout's cache did (`KVReplay`). Its amax is collected
along the way if asked for (docs/fp8.md, sections 5 and 6). All forwards of a call count the tokens whose activations
are not finite.

T tokens and N trained tokens of a micro-batch, L layers, S scales of a layer's cache, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octetrl.config.schema import TrainerConfig
from octetrl.kernels.quantize.count_poisoned import count_poisoned
from octetrl.layers.context import PackedContext, RouterRecord
from octetrl.layers.token_group import TokenGroup
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch
from octetrl.shapes.blocks import KVMode
from octetrl.trainer.activation_checkpoint import layer_runner

NEVER_OBSERVED = -1.0  # below any amax


@dataclass(frozen=True, slots=True)
class KVReplay:
    """The cache with which the samples were drawn. Scales are float32 [L, S], for "calibrated" only."""

    kv_mode: KVMode = "none"
    kv_scale_LS: Tensor | None = None
    by_version: Mapping[int, Tensor] = field(default_factory=dict)  # scales, where several versions drew a batch

    def scale_of(self, micro_batch: MicroBatch) -> Tensor | None:
        """The scales of the version that drew the last token of each sequence: with other weights, its whole cache was
        computed again (`cluster.weights_in_flight`)."""
        if micro_batch.versions_N is None or self.kv_mode != "calibrated":
            return self.kv_scale_LS
        return self.by_version[int(micro_batch.versions_N.max())]


class Forward:
    """The forward passes of one model.

    `is_trained` false: no activations are kept for a backward. `poisoned`: an int64 scalar on the device, to which
    passes add the number of tokens with non-finite activations.
    """

    def __init__(
        self, model: Decoder, config: TrainerConfig, temperature: float, poisoned: Tensor, *, is_trained: bool = True
    ) -> None:
        checkpointing = config.activation_checkpointing if is_trained else "none"
        layers = config.checkpointed_layers if is_trained else None
        self.model, self._temperature, self._chunk = model, temperature, config.logprob_chunk
        self._run_layer = layer_runner(model, checkpointing, layers)
        self._poisoned = poisoned

    def unobserved_amax(self) -> Tensor:
        """A new amax for `hidden` to raise, float32 [L, S]: NEVER_OBSERVED, or 0 beyond a layer's scales."""
        spec = self.model.spec
        amax_LS = torch.zeros(spec.num_layers, spec.num_cache_scales, dtype=torch.float32)
        for layer in range(spec.num_layers):
            amax_LS[layer, : sum(tensor.num_scales for tensor in spec.cached(layer))] = NEVER_OBSERVED
        return amax_LS.to(self.model.lm_head_weight.device)

    def hidden(
        self,
        micro_batch: MicroBatch,
        kv: KVReplay,
        kv_amax_LS: Tensor | None = None,
        routers: RouterRecord | None = None,
        group: TokenGroup | None = None,
    ) -> Tensor:
        """Hidden states [T, E] after the last norm. Raises `kv_amax_LS` in place and fills in `routers` if given.
        `group`: the workers that share the sequences; the micro-batch has the tokens of this one."""
        bounds, scale_LS = (micro_batch.cu_seqlens_B1, micro_batch.max_seqlen), kv.scale_of(micro_batch)
        context = PackedContext(*bounds, kv.kv_mode, scale_LS, kv_amax_LS, routers, group)
        hidden_TE: Tensor = self.model(micro_batch.token_ids_T, micro_batch.positions_T, context, self._run_layer)
        count_poisoned(hidden_TE.detach(), self._poisoned)
        return hidden_TE

    def predictors(
        self,
        micro_batch: MicroBatch,
        kv: KVReplay,
        kv_amax_LS: Tensor | None = None,
        routers: RouterRecord | None = None,
    ) -> Tensor:
        """Hidden states [N, E] from which the trained tokens are predicted."""
        return self.hidden(micro_batch, kv, kv_amax_LS, routers).index_select(0, micro_batch.predictor_N)

    def logprobs_of(self, hidden_NE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the trained tokens, float32 [N]."""
        own_N = micro_batch.temperatures_N
        temperature = self._temperature if own_N is None else own_N
        return self.model.logprobs(hidden_NE, micro_batch.targets_N, temperature, self._chunk)

    def logprobs(
        self, micro_batch: MicroBatch, kv: KVReplay, kv_amax_LS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the trained tokens, float32 [N], from a whole pass."""
        return self.logprobs_of(self.predictors(micro_batch, kv, kv_amax_LS), micro_batch)

    def logprobs_at(self, hidden_NE: Tensor, ids_NK: Tensor) -> Tensor:
        """Log-probs of given tokens and of all others together, float32 [N, K + 1], differentiable."""
        return self.model.logprobs_at(hidden_NE, ids_NK, self._temperature, self._chunk)

    def top_logprobs(self, hidden_NE: Tensor, k: int, below: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest of the first `below` tokens [N, K]; log-probs of these and of all others [N, K + 1]."""
        return self.model.top_logprobs(hidden_NE, k, below, self._temperature, self._chunk)
