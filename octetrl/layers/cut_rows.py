"""Embedding, QK-norm and lm_head of a model that tensor-parallel workers share (layers/tensor_group.py).

    embedding   each worker looks up the tokens whose rows it owns; the others' rows are added as bytes
    QK-norm     the weight is whole on every worker, and its gradient is the sum over the workers' heads, in float32
    lm_head     each worker computes the logits of its rows; they are gathered, so that sampling and log-probs read
                whole rows of logits in today's order. The hidden states' gradient is added in the order of ranks

T tokens, N rows, V vocabulary, W its rows on one worker, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.kernels.rows.embedding_gradient import embedding_gradient
from octetrl.kernels.rows.gather_from_peers import gather_from_peers
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward
from octetrl.layers.embedding import Embedding
from octetrl.layers.norm import RMSNorm
from octetrl.layers.tensor_group import TensorGroup, direct_memory, sum_of_one, sum_over
from octetrl.shapes.tensor_cut import TensorCut


class VocabularyRows:
    """Which rows of embedding and lm_head a worker owns. `HeadCut` of kernels/gemm/linear_logprobs_backward.py."""

    def __init__(self, vocab_size: int, group: TensorGroup) -> None:
        cut = TensorCut(group.rank, group.size)
        self.group = group
        self._shares = [cut.vocabulary(vocab_size, rank) for rank in range(group.size)]
        self.vocab_size, self.own = vocab_size, self._shares[group.rank]

    def whole(self, logits_NW: Tensor) -> Tensor:
        """Logits of all rows, [N, V]."""
        widest = max(map(len, self._shares))
        memory = direct_memory(self.group, logits_NW, widest)
        if memory is not None:
            starts = (*(share.start for share in self._shares), self.vocab_size)
            return gather_from_peers(memory, logits_NW.contiguous(), starts)[0]
        padded_NW = torch.nn.functional.pad(logits_NW, (0, widest - logits_NW.shape[1]))
        parts = self.group.stack(padded_NW)
        return torch.cat([part[:, : len(share)] for part, share in zip(parts, self._shares, strict=True)], dim=1)

    def of(self, dlogits_NV: Tensor) -> Tensor:
        """The columns of this worker's rows, as a view."""
        return dlogits_NV[:, self.own.start : self.own.stop]

    def sum(self, dhidden_NE: Tensor) -> Tensor:
        """The sum over all workers, float32."""
        return sum_over(self.group, dhidden_NE)


def build_embedding(
    vocab_size: int, hidden_size: int, cut: VocabularyRows | None, *, dtype: torch.dtype, device: torch.device | str
) -> Embedding:
    """The embedding of a whole model, or of this worker's rows."""
    if cut is None:
        return Embedding(vocab_size, hidden_size, dtype=dtype, device=device)
    return CutEmbedding(cut, hidden_size, dtype=dtype, device=device)


class CutEmbedding(Embedding):
    """weight [W, E]: the rows `cut.own`."""

    def __init__(
        self, cut: VocabularyRows, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(len(cut.own), hidden_size, dtype=dtype, device=device)
        self._cut = cut

    def forward(self, token_ids_T: Tensor) -> Tensor:
        made: Tensor = _CutEmbed.apply(self.weight, token_ids_T, self._cut.own, self._cut.group)
        return made


class _CutEmbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_WE: Tensor, token_ids_T: Tensor, own: range, group: TensorGroup) -> Tensor:
        is_own_T = (token_ids_T >= own.start) & (token_ids_T < own.stop)
        place_T = torch.where(is_own_T, token_ids_T - own.start, 0)
        ctx.save_for_backward(is_own_T, place_T)
        ctx.num_rows, ctx.dtype = weight_WE.shape[0], weight_WE.dtype
        found_TE = weight_WE.index_select(0, place_T).masked_fill_(~is_own_T[:, None], 0.0)
        return sum_of_one(group, found_TE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        is_own_T, place_T = ctx.saved_tensors
        own_TE = grads[0][is_own_T]
        return embedding_gradient(own_TE, place_T[is_own_T], ctx.num_rows, ctx.dtype), None, None, None


class SharedNorm(RMSNorm):
    """An RMSNorm of heads that are cut. All workers have its weight, and the same gradient of it."""

    def __init__(
        self, group: TensorGroup, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _SharedNorm.apply(x, self.weight, self.eps, self._group)
        return made


class _SharedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(x, weight_C)
        ctx.eps, ctx.group = eps, group
        return rms_norm(x, weight_C, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_C = ctx.saved_tensors
        dx, dweight_C = rms_norm_backward(grads[0], x, weight_C.float(), ctx.eps)
        return dx, sum_over(ctx.group, dweight_C).to(weight_C.dtype), None, None
