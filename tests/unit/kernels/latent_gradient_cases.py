"""Random arguments of `latent_backward`, and its gradients by float64 autograd."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.latent_backward import LatentGradients

SCALE = 0.09
Sizes = tuple[int, int, int]
SIZES: Sizes = (64, 32, 64)  # of a head: nope, rotary, value


class Arguments(NamedTuple):
    dout_THV: Tensor
    q_THN: Tensor
    q_THR: Tensor
    kv_THX: Tensor
    key_TR: Tensor


def draw(
    tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16, common: float = 0.0, sizes: Sizes = SIZES
) -> Arguments:
    """`common`: the size of what all keys, and all values, have in common."""
    nope, rotary, value = sizes
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q_THX, kv_THX = normal(tokens, heads, nope + rotary), normal(tokens, heads, nope + value)
    kv_THX += common * normal(1, heads, nope + value)
    key_TR = normal(tokens, rotary) + common * normal(1, rotary)
    found = normal(tokens, heads, value), q_THX, normal(tokens, heads, rotary), kv_THX, key_TR
    dout_THV, q_THX, *others = (x.to(dtype) for x in found)
    return Arguments(dout_THV, q_THX[..., :nope], *others)  # queries are a view with a gap after every head


def cu_seqlens(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def written_out(arguments: Arguments, lengths: tuple[int, ...]) -> LatentGradients:
    dout, q_THN, q_THR, kv_THX, key_TR = (x.double() for x in arguments)
    nope = q_THN.shape[2]
    q = torch.cat((q_THN, q_THR), 2).requires_grad_()
    kv = kv_THX.requires_grad_()
    key_THR = key_TR[:, None].expand(-1, q.shape[1], -1).clone().requires_grad_()
    for first, end in pairwise(cu_seqlens(lengths).tolist()):
        k = torch.cat((kv[first:end, :, :nope], key_THR[first:end]), 2)
        hidden = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).triu(1)
        score_HTS = SCALE * torch.einsum("thd,shd->hts", q[first:end], k)
        weight_HTS = score_HTS.masked_fill(hidden, -torch.inf).softmax(2)
        out = torch.einsum("hts,shd->thd", weight_HTS, kv[first:end, :, nope:])
        out.backward(dout[first:end])
    assert q.grad is not None and kv.grad is not None and key_THR.grad is not None
    return LatentGradients(q.grad, kv.grad, key_THR.grad)


def errors(found: LatentGradients, want: LatentGradients) -> list[float]:
    return [relative_error(one, other) for one, other in zip(found, want, strict=True)]
