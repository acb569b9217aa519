"""The decoder with a scalar head: a critic (one value a token) or a reward model (one reward a sequence).

    hidden = the trunk of models/decoder.py: the same layers, kernels and FP8 linears by the same policy
    scalar = hidden @ score^T                                              float32, for the rows asked for

The head has one row, `score.weight` [1, E], and no bias, as *ForSequenceClassification with one label has it, and is
saved and loaded under that name (models/hf_weights.py). It is float32 whatever the trunk is: a weight of one row costs
nothing, and its updates, small beside it, would be lost in BF16. It is trained also where the trunk is frozen beside
adapters. There is no lm_head, so the trunk is built as one whose embeddings are tied.

A sequence's reward is the scalar at its last token. transformers looks for the last token that is not padding, which is
the same for a sequence by itself.

T tokens, N rows asked for, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from octetrl.config.schema import LoraConfig
from octetrl.config.spec import ModelSpec
from octetrl.fp8.gemm import BackendName
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder


class ScoreHead(nn.Module):
    """weight float32 [1, E]."""

    def __init__(self, hidden_size: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32, device=device))

    def forward(self, hidden_NE: Tensor) -> Tensor:
        scalars_N: Tensor = hidden_NE.float() @ self.weight[0]
        return scalars_N


class ScalarDecoder(Decoder):
    """Trained and called like a Decoder; `scalars` takes the place of logits."""

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
    ) -> None:
        trunk = replace(spec, tied_embeddings=True)
        super().__init__(trunk, policy, "train", dtype=dtype, device=device, backend=backend, lora=lora)
        self.score = ScoreHead(spec.hidden_size, device=device)

    def scalars(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N], differentiable, of hidden states after the final norm."""
        scalars_N: Tensor = self.score(hidden_NE)
        return scalars_N

    def trains(self, name: str) -> bool:
        return name == "score.weight" or super().trains(name)

    @torch.no_grad()
    def random_init(self, seed: int) -> None:
        """As the Decoder's, and a head of zeros: every scalar is 0 until it has learnt."""
        super().random_init(seed)
        self.score.weight.zero_()
