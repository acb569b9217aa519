"""The trainer's forward passes: hidden states and log-probs of a micro-batch, by the policy or its reference.

The policy sees K and V as the rollout's cache did (`KVReplay`), and their amax is collected on the way if it is asked
for (docs/fp8.md, sections 5 and 6). Tokens whose activations are not finite are counted in all forwards of a call.

T tokens and N trained tokens of a micro-batch, L layers, K KV heads, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.config.schema import TrainerConfig
from octetrl.kernels.quantize.count_poisoned import count_poisoned
from octetrl.layers.context import KVMode, PackedContext
from octetrl.models.decoder import Decoder
from octetrl.records import MicroBatch
from octetrl.trainer.activation_checkpoint import layer_runner

NEVER_OBSERVED = -1.0  # below any amax


@dataclass(frozen=True, slots=True)
class KVReplay:
    """The cache that the samples were drawn with. Scales are float32 [L, K], for "calibrated" only."""

    kv_mode: KVMode = "none"
    k_scale_LK: Tensor | None = None
    v_scale_LK: Tensor | None = None


class Forward:
    """Of one model. `is_trained` false: no activations are kept for a backward. `poisoned`, an int64 scalar on the
    device, counts the tokens whose activations are not finite."""

    def __init__(
        self, model: Decoder, config: TrainerConfig, temperature: float, poisoned: Tensor, *, is_trained: bool = True
    ) -> None:
        checkpointing = config.activation_checkpointing if is_trained else "none"
        layers = config.checkpointed_layers if is_trained else None
        self.model, self._temperature, self._chunk = model, temperature, config.logprob_chunk
        self._run_layer = layer_runner(model, checkpointing, layers)
        self._poisoned = poisoned

    def unobserved_amax(self) -> Tensor:
        """float32 [2, L, K] for `hidden` to raise: max|K| and max|V| of heads that no token has met yet."""
        shape = (2, self.model.spec.num_layers, self.model.spec.num_kv_heads)
        return torch.full(shape, NEVER_OBSERVED, dtype=torch.float32, device=self.model.lm_head_weight.device)

    def hidden(self, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None = None) -> Tensor:
        """Hidden states [T, E] behind the last norm; raises `kv_amax_2LK` in place."""
        context = PackedContext(
            cu_seqlens_B1=micro_batch.cu_seqlens_B1,
            max_seqlen=micro_batch.max_seqlen,
            kv_mode=kv.kv_mode,
            k_scale_LK=kv.k_scale_LK,
            v_scale_LK=kv.v_scale_LK,
            kv_amax_2LK=kv_amax_2LK,
        )
        hidden_TE: Tensor = self.model(micro_batch.token_ids_T, micro_batch.positions_T, context, self._run_layer)
        count_poisoned(hidden_TE.detach(), self._poisoned)
        return hidden_TE

    def predictors(self, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None = None) -> Tensor:
        """Hidden states [N, E] that the trained tokens are predicted from."""
        return self.hidden(micro_batch, kv, kv_amax_2LK).index_select(0, micro_batch.predictor_N)

    def logprobs_of(self, hidden_NE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the trained tokens, float32 [N]."""
        return self.model.logprobs(hidden_NE, micro_batch.targets_N, self._temperature, self._chunk)

    def logprobs(
        self, micro_batch: MicroBatch, kv: KVReplay, kv_amax_2LK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.logprobs_of(self.predictors(micro_batch, kv, kv_amax_2LK), micro_batch)

    def logprobs_at(self, hidden_NE: Tensor, ids_NK: Tensor) -> Tensor:
        """Log-probs of given tokens, float32 [N, K], differentiable."""
        return self.model.logprobs_at(hidden_NE, ids_NK, self._temperature, self._chunk)

    def top_logprobs(self, hidden_NE: Tensor, k: int, below: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest of the first `below` tokens and their log-probs, [N, K] each."""
        return self.model.top_logprobs(hidden_NE, k, below, self._temperature, self._chunk)
