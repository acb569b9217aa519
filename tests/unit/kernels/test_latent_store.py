"""Latents on their way into the cache: bytes of the quantiser, values that the trainer reads, and the kernels' bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.fp8.quantize import quantize_kv_per_token
from octetrl.kernels.attention.latent_store import (
    latent_replay,
    latent_replay_reference,
    latent_replay_triton,
    latent_store,
    latent_store_reference,
    latent_store_triton,
    latent_values,
)
from octetrl.kernels.attention.records import CachedPages
from tests.unit.kernels.latent_cases import bytes_of_pages, empty_pages

PAGES, PAGE_SIZE, LATENT, ROTARY = 3, 4, 40, 8
SLOTS = torch.tensor([5, -1, 11, 0, 4])


def tokens() -> tuple[Tensor, Tensor]:
    """Latents (a view of wider rows) with a token of zeros, a huge and a tiny one; and rotary keys."""
    wide = torch.randn(len(SLOTS), LATENT + ROTARY, generator=torch.Generator().manual_seed(0))
    wide *= torch.tensor([1.0, 3.0, 1e30, 0.0, 1e-38])[:, None]
    return wide.bfloat16().split((LATENT, ROTARY), 1)


def pages(dtype: torch.dtype) -> tuple[CachedPages, CachedPages]:
    return empty_pages(PAGES, PAGE_SIZE, LATENT, ROTARY, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_what_is_stored_is_what_the_trainer_reads(dtype: torch.dtype) -> None:
    (latent_TC, key_TR), (latent, key) = tokens(), pages(dtype)
    latent_store(latent_TC, key_TR, latent, key, SLOTS)
    value_TC = latent_replay(latent_TC, "none" if latent.token_scale is None else "dynamic")
    for token, slot in enumerate(SLOTS.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_SIZE)
        assert torch.equal(key.pages[page, offset], key_TR[token])
        stored_C = latent.pages[page, offset]
        if latent.token_scale is not None:
            stored_C = latent_values(stored_C[None], latent.token_scale[page, :, offset][None])[0]
        assert torch.equal(stored_C, value_TC[token]), token
    unused = [slot for slot in range(PAGES * PAGE_SIZE) if slot not in SLOTS]
    assert not key.pages.flatten(0, 1)[unused].any(), "slot -1 writes nothing"


def test_a_value_is_its_code_times_the_tokens_scale() -> None:
    latent_TC, _ = tokens()
    codes_T1C, scale_T1 = quantize_kv_per_token(latent_TC[:, None])
    want_TC = (decode_e4m3(codes_T1C[:, 0]).double() * scale_T1.double()).float().bfloat16()
    assert torch.equal(latent_replay(latent_TC, "dynamic"), want_TC)
    ordinary = latent_TC[:3].double()
    assert ((want_TC[:3].double() - ordinary).norm(dim=1) < 0.03 * ordinary.norm(dim=1)).all()


def test_what_is_not_finite_stays_so() -> None:
    latent_TC, _ = tokens()
    latent_TC[0, 3] = torch.inf
    value_TC = latent_replay(latent_TC, "dynamic")
    assert value_TC[0].isnan().all() and value_TC[1:].isfinite().all()


def test_fp8_pages_without_scales_are_refused() -> None:
    latent, key = pages(E4M3)
    with pytest.raises(ValueError, match="a scale for each token"):
        latent_store(*tokens(), CachedPages(latent.pages), key, SLOTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_the_kernels_have_the_references_bytes(dtype: torch.dtype) -> None:
    """Values that need no rounding but the code's place: the interpreter's rounding is not a GPU's."""
    latent_TC, key_TR = tokens()
    codes_TC = torch.randint(0, 126, latent_TC.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes_TC[:, 7] = 126  # 448: scales are powers of two
    latent_TC = decode_e4m3(codes_TC.view(E4M3)) * torch.tensor([1.0, -4.0, 0.125, 0.0, 2.0**60])[:, None]
    latent_TC = latent_TC.bfloat16()
    theirs, ours = pages(dtype), pages(dtype)
    latent_store_reference(latent_TC, key_TR, *theirs, SLOTS)
    latent_store_triton(latent_TC, key_TR, *ours, SLOTS)
    assert bytes_of_pages(ours) == bytes_of_pages(theirs)
    assert torch.equal(latent_replay_triton(latent_TC), latent_replay_reference(latent_TC))
