"""Rows of codes by token: the reference against quantising the gathered rows, the kernel (interpreted) against it."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.rows.gather_codes import gather_codes, gather_codes_triton


def bytes_of(x: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    return x.codes.view(torch.uint8), x.scale


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(7, 21, 384), (5, 2, 128), (3, 6, 200), (4, 0, 256)])
def test_a_gathered_row_of_codes_is_the_gathered_row_quantised(tokens: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x_TK = torch.randn(tokens, columns, generator=generator).bfloat16() * torch.arange(1, tokens + 1)[:, None]
    token_P = torch.randint(tokens, (rows,), generator=generator)
    want = quantize_activation_reference(x_TK[token_P])
    for strides in ("rows", "blocks"):
        x = quantize_activation_reference(x_TK)
        x = x._replace(scale=x.scale.contiguous() if strides == "rows" else x.scale.t().contiguous().t())
        for found in (gather_codes(x, token_P), gather_codes_triton(x, token_P)):
            assert found.codes.dtype == want.codes.dtype and found.scale.shape == want.scale.shape
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(bytes_of(found), bytes_of(want), strict=True))
            assert rows < 2 or found.scale.stride(0) == 1, "as the grouped GEMM reads them"
