"""Norm, rotation and store of latents in one kernel: the bytes of the separate kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octetrl.kernels.attention.latent_store as latent_store_file
import octetrl.kernels.rows.rms_norm as rms_norm_file
import octetrl.kernels.rows.rope as rope_file
from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.latent_prepare import can_fuse, latent_prepare_triton
from octetrl.kernels.attention.records import CachedPages
from tests.unit.kernels.latent_cases import bytes_of_pages, empty_pages

PAGES, PAGE_SIZE = 3, 4
SLOTS = torch.tensor([5, -1, 11, 0, 4])
EPS = 1e-6


def separate(
    q_THR: Tensor, kv_a_TX: Tensor, weight_C: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool,
    pages: tuple[CachedPages, CachedPages],
) -> Tensor:  # fmt: skip
    """By the kernels of the four ops."""
    latent_TC, key_TR = kv_a_TX.split((weight_C.numel(), q_THR.shape[2]), 1)
    latent_TC = rms_norm_file.rms_norm_triton(latent_TC, weight_C, EPS)
    key_TR = rope_file.rope_triton(key_TR.unsqueeze(1), *angles, 1, interleaved).squeeze(1)
    latent_store_file.latent_store_triton(latent_TC, key_TR, *pages, SLOTS)
    return rope_file.rope_triton(q_THR, *angles, 1, interleaved)


@pytest.mark.parametrize(
    ("dtype", "interleaved", "heads", "latent"), [(E4M3, True, 16, 512), (torch.bfloat16, False, 3, 320)]
)
def test_one_kernel_has_the_bytes_of_four(dtype: torch.dtype, interleaved: bool, heads: int, latent: int) -> None:
    generator, rotary = torch.Generator().manual_seed(0), 8
    q_THX = torch.randn(len(SLOTS), heads, 24 + rotary, generator=generator).bfloat16()
    kv_a_TX = torch.randn(len(SLOTS), latent + rotary, generator=generator)
    kv_a_TX = (kv_a_TX * torch.tensor([1.0, 3.0, 1e30, 0.0, 1e-3])[:, None]).bfloat16()
    weight_C = torch.randn(latent, generator=generator).bfloat16()
    angle_TP = torch.randn(len(SLOTS), rotary // 2, generator=generator)
    angles = angle_TP.cos(), angle_TP.sin()
    theirs, ours = (empty_pages(PAGES, PAGE_SIZE, latent, rotary, dtype) for _ in range(2))
    want_THR = separate(q_THX[..., 24:], kv_a_TX, weight_C, angles, interleaved, theirs)
    got_THR = latent_prepare_triton(q_THX[..., 24:], kv_a_TX, weight_C, EPS, angles, interleaved, *ours, SLOTS)
    assert torch.equal(got_THR, want_THR) and bytes_of_pages(ours) == bytes_of_pages(theirs)


def test_sizes_whose_sums_have_another_order_are_left_to_the_separate_kernels() -> None:
    assert [can_fuse(size) for size in (128, 256, 512, 2048, 4096)] == [False, True, True, True, False]
