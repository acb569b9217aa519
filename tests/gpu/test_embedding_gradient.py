"""The embedding's gradient on a Hopper GPU: near float64, and one set of bits however often a token occurs."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.embedding_gradient import embedding_gradient

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [96, 1024, 3584])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_near_float64_and_repeated_to_the_bit(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rare = torch.randint(0, 5000, (4000,), device="cuda")
    ids_T = torch.cat([rare, torch.full((3000,), 7, device="cuda"), torch.full((17,), 4999, device="cuda")])
    ids_T = ids_T[torch.randperm(len(ids_T), device="cuda")]
    dy_TE = torch.randn(len(ids_T), size, device="cuda").to(dtype)
    got_VE = embedding_gradient(dy_TE, ids_T, 5001, torch.float32)
    want_VE = torch.zeros(5001, size, dtype=torch.float64, device="cuda").index_add_(0, ids_T, dy_TE.double())
    assert (got_VE - want_VE).norm() < 1e-6 * want_VE.norm()
    assert not got_VE[5000].any()
    rounded_VE = embedding_gradient(dy_TE, ids_T, 5001, torch.bfloat16)
    assert torch.equal(rounded_VE, got_VE.bfloat16())
    for _ in range(10):
        assert torch.equal(embedding_gradient(dy_TE, ids_T, 5001, torch.float32), got_VE)
