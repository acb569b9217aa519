"""MLA over pages: decode, prefill and the packed forward have one result, in the reference to the bit."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.latent_decode import latent_decode
from octetrl.kernels.attention.latent_packed import latent_packed
from octetrl.kernels.attention.latent_paged import latent_paged, latent_paged_triton
from tests.unit.kernels.latent_cases import SCALE, latents, paged, written_out

LENGTHS = (70, 1, 130)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])


@DTYPES
@pytest.mark.parametrize("counts", [(1, 1, 1), (7, 1, 80)], ids=["decode", "prefill"])
def test_the_reference_has_the_packed_forwards_bits(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    case = latents(LENGTHS, 3, 40, 8, dtype)
    packed_THC = latent_packed(*case[:4], case.cu_seqlens_B1, max(LENGTHS), SCALE)
    for page_size in (16, 128):
        cache, token_Q = paged(case, counts, page_size, dtype)
        found = latent_paged(*cache)
        assert torch.equal(found[:-1], packed_THC[token_Q])
        assert not found[-1].any(), "a padding sequence has zeros"


@DTYPES
@pytest.mark.parametrize(("counts", "heads", "page_size"), [((1, 1), 20, 128), ((1, 14), 5, 16)])
def test_the_kernels_are_near_the_formula(
    counts: tuple[int, ...], heads: int, page_size: int, dtype: torch.dtype
) -> None:
    """20 heads are two programs of decode; 14 queries of 5 heads are two blocks of rows."""
    case = latents((3, 70), heads, 40, 8, dtype)
    cache, token_Q = paged(case, counts, page_size, dtype)
    found = latent_paged_triton(*cache, max(counts))
    assert relative_error(found[:-1], written_out(case)[token_Q]) < 1e-2
    assert not found[-1].any()


def test_decode_by_chunks_has_the_bits_of_decode_in_one_program() -> None:
    case = latents((1_100, 40), 2, 32, 16, torch.bfloat16)
    cache, token_Q = paged(case, (1, 1), 128, torch.bfloat16)
    tables = *cache[:5], cache.context_lens_B, SCALE
    whole, apart = latent_decode(*tables, split=False), latent_decode(*tables, split=True)
    assert torch.equal(whole, apart)
    assert relative_error(whole[:-1], written_out(case)[token_Q]) < 1e-2
