"""LoRA on a stack of matrices, such as the experts': each has an A and a B of its own (layers/lora.py has the formula).

    t = round(x A_e^T);  u = round(t_p B_ep^T);  y = round(y + round(s u))      for the rows of expert e, by part p

Both products are grouped GEMMs, which add each row along K in one order (kernels/gemm/grouped_bf16_gemm.py). A row's
bits therefore do not depend on the other rows, nor on how many an expert has.

`a` [X P R, K]: the A of all parts of the first expert, then of the second. `b` [X n, R]: likewise the rows of B.

Backward: that of layers/lora.py. In float32 on a CPU, in the model's dtype on a GPU.

Legend: M rows sorted by expert, X experts, N out_features and K in_features of one, P parts, R rank, n rows of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octetrl.config.lora import LoraPart
from octetrl.kernels.gemm.grouped_bf16_gemm import Part, grouped_bf16_gemm, grouped_wgrad
from octetrl.layers.lora import LoraAdapter, _working


class StackedLoraAdapter(LoraAdapter):
    """The branches of `count` matrices of one shape."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[LoraPart],
        rank: int,
        alpha: float,
        count: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(in_features, parts, rank, alpha, dtype=dtype, device=device)
        self.count = count
        a_RK, b_nR = self.a, self.b
        self.a = torch.nn.Parameter(torch.empty(count * a_RK.shape[0], in_features, dtype=dtype, device=device))
        self.b = torch.nn.Parameter(torch.zeros(count * b_nR.shape[0], rank, dtype=dtype, device=device))

    def matrices(self) -> Iterator[tuple[str, LoraPart, Tensor, Tensor]]:
        a_XRK, b_XnR = self.a.view(self.count, -1, self.in_features), self.b.view(self.count, -1, self.rank)
        for expert in range(self.count):
            for index, part in enumerate(self.parts):
                rows = self.rows_of(part)
                a_RK = a_XRK[expert, index * self.rank : (index + 1) * self.rank]
                yield f"{expert}.", part, a_RK, b_XnR[expert, rows.start : rows.stop]

    def rows_of(self, part: LoraPart) -> Part:
        """The rows of B of one part, in each expert's."""
        before = self.parts[: self.parts.index(part)]
        first = sum(other.stop - other.start for other in before)
        return Part(first, first + part.stop - part.start)

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        of_expert = iter(weight.view(self.count, -1, self.in_features))
        rows_NK = next(of_expert)
        for index, (_, part, a_RK, b_nR) in enumerate(self.matrices()):
            if index and index % len(self.parts) == 0:
                rows_NK = next(of_expert)
            rows_nK = rows_NK[part.start : part.stop]
            rows_nK.copy_(rows_nK.float() + self.scale * (b_nR.float() @ a_RK.float()))

    def of_rows(self, y_MN: Tensor, x_MK: Tensor, first_X1: Tensor) -> Tensor:
        """y with the branch of each row's expert. `first_X1`: rows of expert e are first[e] to first[e + 1]."""
        out_MN: Tensor = _StackedLoraFunction.apply(y_MN, x_MK, self.a, self.b, first_X1, self)
        return out_MN


class _StackedLoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_MN: Tensor,
        x_MK: Tensor,
        a_RK: Tensor,
        b_nR: Tensor,
        first_X1: Tensor,
        adapter: StackedLoraAdapter,
    ) -> Tensor:
        t_MR = grouped_bf16_gemm(x_MK, a_RK, first_X1)
        out_MN = y_MN.clone()
        for part, t_part in _by_part(adapter, t_MR):
            u_Mn = grouped_bf16_gemm(t_part, b_nR, first_X1, part=adapter.rows_of(part))
            out_MN[:, part.start : part.stop].add_(u_Mn * adapter.scale)
        ctx.save_for_backward(x_MK, t_MR, a_RK, b_nR, first_X1)
        ctx.adapter = adapter
        return out_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, t_MR, a_RK, b_nR, first_X1 = ctx.saved_tensors
        adapter: StackedLoraAdapter = ctx.adapter
        working = _working(x_MK)
        dts, dbs = [], []
        for part, t_part in _by_part(adapter, t_MR):
            dy_Mn = (grads[0][:, part.start : part.stop].to(working) * adapter.scale).contiguous()
            dts.append(grouped_bf16_gemm(dy_Mn, b_nR, first_X1, turned=True, part=adapter.rows_of(part)))
            db_nR = grouped_wgrad(dy_Mn, t_part.to(working), first_X1, b_nR.dtype)
            dbs.append(db_nR.view(adapter.count, -1, adapter.rank))
        dt_MR = torch.cat(dts, 1)
        dx_MK = None
        if ctx.needs_input_grad[1]:
            dx_MK = grouped_bf16_gemm(dt_MR, a_RK, first_X1, turned=True).to(x_MK.dtype)
        da_RK = grouped_wgrad(dt_MR, x_MK.to(working), first_X1, a_RK.dtype)
        return grads[0], dx_MK, da_RK, torch.cat(dbs, 1).flatten(0, 1), None, None


def _by_part(adapter: StackedLoraAdapter, t_MR: Tensor) -> Iterator[tuple[LoraPart, Tensor]]:
    parts = (t_part.contiguous() for t_part in t_MR.split(adapter.rank, dim=1))
    return zip(adapter.parts, parts, strict=True)
