"""What the attention module adds to its kernels: the amax of K and V, per head, in place."""

from __future__ import annotations

import torch

from octetrl.models.blocks.attention.module import observe_amax


def test_amax_is_raised_per_head_and_keeps_what_was_seen() -> None:
    k_TKD = torch.tensor([[[1.0, -3.0], [0.5, 0.25]], [[2.0, 0.0], [-0.75, 0.0]]], dtype=torch.bfloat16)
    amax_2K = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
    observe_amax(amax_2K, k_TKD, 2 * k_TKD)
    assert amax_2K.tolist() == [[3.0, 9.0], [6.0, 1.5]]


def test_amax_of_a_strided_view_of_the_fused_output() -> None:
    qkv_THD = torch.randn(50, 8, 32).bfloat16()
    k_TKD, v_TKD = qkv_THD[:, 4:6], qkv_THD[:, 6:]
    amax_2K = torch.zeros(2, 2)
    observe_amax(amax_2K, k_TKD, v_TKD)
    assert torch.equal(amax_2K, torch.stack((k_TKD, v_TKD)).abs().amax((1, 3)).float())


def test_a_nan_stays_in_the_amax() -> None:
    """It must reach the scales, which refuse it; a maximum that forgot it would publish a wrong scale."""
    k_TKD = torch.ones(3, 2, 4).bfloat16()
    k_TKD[1, 1, 2] = torch.nan
    amax_2K = torch.zeros(2, 2)
    observe_amax(amax_2K, k_TKD, torch.ones(3, 2, 4).bfloat16())
    observe_amax(amax_2K, torch.ones(3, 2, 4).bfloat16(), torch.ones(3, 2, 4).bfloat16())
    assert amax_2K[0, 0] == 1 and amax_2K[0, 1].isnan()
