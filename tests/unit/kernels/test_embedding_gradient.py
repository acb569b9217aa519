"""The rows of equal tokens are added up in float32, in the order of a stable sort, whatever their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows.embedding_gradient import TILE, embedding_gradient_reference, embedding_gradient_triton

VOCAB = 9
BOTH = pytest.mark.parametrize("gradient", [embedding_gradient_reference, embedding_gradient_triton])


def tokens(*counts: int) -> Tensor:
    """`counts[v]` times the token v, shuffled."""
    ids_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids_T[torch.randperm(len(ids_T), generator=torch.Generator().manual_seed(0))]


@BOTH
@pytest.mark.parametrize("size", [8, 40, 520])
def test_equals_the_sum_of_each_tokens_rows(gradient, size: int) -> None:
    ids_T = tokens(1, TILE - 1, TILE, TILE + 1, 0, 3 * TILE, 2, 0, 1)
    dy_TE = torch.randn(len(ids_T), size, generator=torch.Generator().manual_seed(1)).bfloat16()
    got_VE = gradient(dy_TE, ids_T, VOCAB, torch.float32)
    for token in range(VOCAB):
        torch.testing.assert_close(got_VE[token].double(), dy_TE[ids_T == token].double().sum(0), rtol=1e-5, atol=1e-5)


@BOTH
def test_a_frequent_token_keeps_growing_and_is_rounded_once(gradient) -> None:
    ids_T = torch.zeros(700, dtype=torch.int64)
    got_VE = gradient(torch.ones(700, 4).bfloat16(), ids_T, 2, torch.bfloat16)
    assert got_VE.dtype == torch.bfloat16 and got_VE[0].tolist() == [700.0] * 4 and not got_VE[1].any()


@BOTH
def test_nothing_to_add_is_zero(gradient) -> None:
    got_VE = gradient(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), 3, torch.bfloat16)
    assert got_VE.shape == (3, 4) and not got_VE.any()


def test_one_order_of_sums() -> None:
    """Tiles of TILE rows in order of position, each a tree, whatever other tokens stand between them."""
    ids_T = tokens(2 * TILE + 3, 5)
    dy_TE = torch.randn(len(ids_T), 4, generator=torch.Generator().manual_seed(2)) * 1e3
    alone_VE = embedding_gradient_triton(dy_TE[ids_T == 0], ids_T[ids_T == 0], VOCAB, torch.float32)
    assert torch.equal(embedding_gradient_triton(dy_TE, ids_T, VOCAB, torch.float32)[0], alone_VE[0])
