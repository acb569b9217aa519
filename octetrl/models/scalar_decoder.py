"""The decoder with a scalar head: a critic (one value a token) or a reward model (one reward a sequence).

    hidden = the trunk of models/decoder.py: the same layers, kernels and FP8 linears by the same policy
    scalar = hidden @ score^T                                              float32, for the requested rows

The head is `score.weight` [1, E] without bias, as in *ForSequenceClassification with one label, and has that name in
checkpoints (models/hf_weights.py). It is always float32: it is small, and BF16 would lose its small updates. It is also
trained if the trunk is frozen beside adapters. There is no lm_head, so the trunk is built with tied embeddings.

A sequence's reward is the scalar at its last token that is not the config's `pad_token_id`, as in transformers
(`pooled_rows`). Training refuses sequences that end with it.

T tokens, B sequences, N requested rows, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from octetrl.config.schema import LoraConfig
from octetrl.fp8.backends import BackendName
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec


def pooled_rows(token_ids_T: Tensor, cu_seqlens_B1: Tensor, pad_token_id: int | None) -> Tensor:
    """Index into T of the token of each sequence at which its reward is read, int64 [B]: the last that is not
    `pad_token_id`, or the first if all are. None: the last."""
    last_B = cu_seqlens_B1[1:].long() - 1
    if pad_token_id is None:
        return last_B
    place_T = torch.arange(token_ids_T.numel(), device=token_ids_T.device)
    others_T = torch.where(token_ids_T == pad_token_id, -1, place_T).cummax(0).values
    return torch.maximum(others_T[last_B], cu_seqlens_B1[:-1].long())


class ScoreHead(nn.Module):
    """weight float32 [1, E]."""

    def __init__(self, hidden_size: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32, device=device))

    def forward(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N]. On a CPU the sums are float64, so that a scalar's bits do not depend on the other rows."""
        wide = torch.float64 if hidden_NE.device.type == "cpu" else torch.float32
        scalars_N: Tensor = (hidden_NE.to(wide) @ self.weight[0].to(wide)).float()
        return scalars_N


class ScalarDecoder(Decoder):
    """A Decoder with `scalars` instead of logits."""

    is_scalar = True

    def __init__(
        self,
        spec: ModelSpec,
        policy: PrecisionPolicy,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: BackendName = "emulated",
        lora: LoraConfig | None = None,
        fp8_weights: bool = True,
    ) -> None:
        trunk = replace(spec, tied_embeddings=True)
        super().__init__(
            trunk, policy, "train", dtype=dtype, device=device, backend=backend, lora=lora, fp8_weights=fp8_weights
        )
        self.score = ScoreHead(spec.hidden_size, device=device)

    def scalars(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N], differentiable, of hidden states after the final norm."""
        scalars_N: Tensor = self.score(hidden_NE)
        return scalars_N

    def trains(self, name: str) -> bool:
        return name == "score.weight" or super().trains(name)

    @torch.no_grad()
    def random_init(self, seed: int) -> None:
        """Initialises like the Decoder, with zeros in the head: every scalar is 0 before training."""
        super().random_init(seed)
        self.score.weight.zero_()
