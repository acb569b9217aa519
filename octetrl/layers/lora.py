"""LoRA: a low-rank branch beside a frozen projection, the same for trainer and engine (arXiv:2106.09685).

    y[M, N] = W x + s B A x,    s = alpha / rank;     A [R, K] small and random, B [N, R] zero at the beginning

    t = round(x A^T)            one GEMM for all parts of a fused projection: their A are stacked
    u = round(t_p B_p^T)        for each part p, from its columns of t
    y = round(y + round(s u))   y is the base's product, in BF16 or FP8, bias included, rounded

Values are rounded to the model's dtype, at the same points as in PEFT. The base has the codes and kernels of a model
without adapters. The branch reads x before the base quantises it. Both products add along K in one order for any number
of rows (bf16_gemm.py, lora_up.py; float64 on a CPU). A token's bits therefore do not depend on the other tokens, and
trainer and engine compute the same bits. There is no dropout, because the two sides could not drop the same values.

Backward, from dy: dB_p = s dy_p^T t_p;  dt_p = s dy_p B_p;  dA = dt^T x;  dx = dt A, added to the base's. x and t are
saved for it. On a CPU it runs in float32.

The fused forms of a GPU (models/blocks/products.py) call the functions of this file and add the branch in place.

Legend: M tokens, N out_features, K in_features, R rank, P parts of a fused projection, n rows of one part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octetrl.config.lora import LoraPart
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.gemm.lora_up import lora_up


class LoraAdapter(nn.Module):
    """The branch of one projection. `a` [P R, K], `b` [sum of n, R], in `dtype`. The projection passes in its product.

    Undefined until `draw` or loading.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[LoraPart],
        rank: int,
        alpha: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.rank, self.scale = in_features, tuple(parts), rank, alpha / rank
        rows = sum(part.stop - part.start for part in parts)
        self.a = nn.Parameter(torch.empty(len(self.parts) * rank, in_features, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=device))

    @torch.no_grad()
    def draw(self, seed: int, name: str) -> None:
        """Initialises as PEFT does: A uniform within 1 / sqrt(K), drawn on the CPU from (seed, name), and B zero."""
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        bound = 1.0 / math.sqrt(self.in_features)
        self.a.copy_(torch.empty(self.a.shape).uniform_(-bound, bound, generator=generator))
        self.b.zero_()

    def own_tensors(self) -> None:
        """Replaces A and B by frozen copies, for the adapters of a reference."""
        for name, parameter in list(self._parameters.items()):
            assert parameter is not None
            self._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)

    def part_tensors(self, part: LoraPart) -> tuple[Tensor, Tensor]:
        """A [R, K] and B [n, R] of one part: views."""
        index = self.parts.index(part)
        first = sum(other.stop - other.start for other in self.parts[:index])
        rank = self.rank
        return self.a[index * rank : (index + 1) * rank], self.b[first : first + part.stop - part.start]

    def matrices(self) -> Iterator[tuple[str, LoraPart, Tensor, Tensor]]:
        """A [R, K] and B [n, R] of each part: views. With experts the name begins with the expert's id: "7."."""
        for part in self.parts:
            yield "", part, *self.part_tensors(part)

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """Adds the branch to its weight in place: round(W + s B A)."""
        for _, part, a_RK, b_nR in self.matrices():
            rows_nK = weight[part.start : part.stop]
            rows_nK.copy_(rows_nK.float() + self.scale * (b_nR.float() @ a_RK.float()))

    def forward(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        out_MN: Tensor = _LoraFunction.apply(y_MN, x_MK, self.a, self.b, self)
        return out_MN

    def extra_repr(self) -> str:
        return f"{', '.join(part.name for part in self.parts)}, rank={self.rank}, scale={self.scale:g}"


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MN: Tensor, x_MK: Tensor, a_PRK: Tensor, b_NR: Tensor, adapter: LoraAdapter) -> Tensor:
        t_MPR = lora_down(adapter, x_MK)
        ctx.save_for_backward(x_MK, t_MPR, a_PRK, b_NR)
        ctx.adapter = adapter
        out_MN = y_MN.clone()
        add_branch(adapter, out_MN, t_MPR)
        return out_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, t_MPR, _, _ = ctx.saved_tensors
        dt_MPR = lora_dt(ctx.adapter, grads[0])
        dx_MK = lora_dgrad(ctx.adapter, dt_MPR, x_MK.dtype) if ctx.needs_input_grad[1] else None
        return grads[0], dx_MK, *lora_wgrad(ctx.adapter, grads[0], x_MK, t_MPR, dt_MPR), None


@torch.no_grad()
def lora_down(adapter: LoraAdapter, x_MK: Tensor) -> Tensor:
    """t [M, P R]. No gradient."""
    return bf16_gemm_straight(x_MK.contiguous(), adapter.a.detach())


@torch.no_grad()
def add_branch(adapter: LoraAdapter, y_MN: Tensor, t_MPR: Tensor) -> None:
    """Adds the branch to y in place. Columns without an adapter do not change. No gradient."""
    for part, t_MR in _by_part(adapter, t_MPR):
        _, b_nR = adapter.part_tensors(part)
        lora_up(y_MN[:, part.start : part.stop], t_MR, b_nR.detach(), adapter.scale)


@torch.no_grad()
def lora_dt(adapter: LoraAdapter, dy_MN: Tensor) -> Tensor:
    """dt [M, P R], float32 on a CPU."""
    working = _working(dy_MN)
    parts = [
        (dy_MN[:, part.start : part.stop].to(working) @ adapter.part_tensors(part)[1].to(working)) * adapter.scale
        for part in adapter.parts
    ]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def lora_dgrad(adapter: LoraAdapter, dt_MPR: Tensor, dtype: torch.dtype) -> Tensor:
    """The branch's part of dx [M, K]."""
    return (dt_MPR @ adapter.a.to(dt_MPR.dtype)).to(dtype)


@torch.no_grad()
def lora_wgrad(
    adapter: LoraAdapter, dy_MN: Tensor, x_MK: Tensor, t_MPR: Tensor, dt_MPR: Tensor
) -> tuple[Tensor, Tensor]:
    """dA [P R, K] and dB [sum of n, R], in the adapter's dtype."""
    working = dt_MPR.dtype
    da_PRK = (dt_MPR.t() @ x_MK.to(working)).to(adapter.a.dtype)
    db = [
        (dy_MN[:, part.start : part.stop].to(working).t() @ t_MR.to(working)) * adapter.scale
        for part, t_MR in _by_part(adapter, t_MPR)
    ]
    return da_PRK, torch.cat(db).to(adapter.b.dtype)


def _by_part(adapter: LoraAdapter, t_MPR: Tensor) -> Iterator[tuple[LoraPart, Tensor]]:
    return zip(adapter.parts, t_MPR.split(adapter.rank, dim=1), strict=True)


def _working(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "cpu" else tensor.dtype
