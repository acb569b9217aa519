"""Calibrated KV scales: the formula, what is refused, and equality by bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octetrl.fp8.format import decode_e4m3
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax, same_bits
from octetrl.fp8.quantize import quantize_kv_per_head
from octetrl.kernels.attention.kv_store import saturated_count
from tests.parity.shapes import TINY

BF16_MAX = torch.finfo(torch.bfloat16).max
SPEC = replace(TINY["qwen3"], num_layers=2, num_heads=3, num_kv_heads=3)
AMAX = torch.tensor([[1.0, 448.0, 0.0], [3.5, 0.1, 1e4]])  # of three heads


def test_scale_is_margin_times_amax_over_448_and_zero_gives_one() -> None:
    scales = kv_scales_from_amax(torch.cat((AMAX, 2 * AMAX), 1), SPEC, policy_version=7)
    assert scales.policy_version == 7
    k_scale_LK, v_scale_LK = scales.scale_LS.split(3, 1)
    assert k_scale_LK[0, 1].item() == pytest.approx(1.05, rel=1e-6)
    assert k_scale_LK[0, 2].item() == v_scale_LK[0, 2].item() == 1.0
    assert torch.allclose(v_scale_LK[1], AMAX[1] * 2.1 / 448)
    assert (AMAX[1] / k_scale_LK[1] < 448).all(), "the margin leaves room"
    tensors = scales.to_tensors(SPEC)
    assert torch.equal(tensors["k_scale"], k_scale_LK) and torch.equal(tensors["v_scale"], v_scale_LK)
    assert same_bits(KVScales.from_tensors(tensors, SPEC, torch.device("cpu")), scales)


@pytest.mark.parametrize("amax", [9e-41, 1e-38, 1e-37, 2e-36, 1e-30, 1.0, 1e38, BF16_MAX])
def test_no_amax_that_bf16_can_hold_makes_anything_non_finite(amax: float) -> None:
    largest = torch.tensor(amax).bfloat16()
    x = largest * torch.tensor([-1.0, -0.5, -0.0, 0.0, 0.1, 1.0]).bfloat16().view(1, 1, -1)
    scale_K = kv_scales_from_amax(largest.float().expand(2, 6), SPEC, policy_version=0).scale_LS[0, :1]
    assert scale_K.isfinite().all() and scale_K > 0
    codes = decode_e4m3(quantize_kv_per_head(x, scale_K).codes)
    back = codes * scale_K
    assert torch.equal(back == 0, codes == 0) and (codes[x == 0] == 0).all()
    assert back.bfloat16().isfinite().all() and (back.abs() <= 1.07 * x.float().abs()).all()
    if amax >= 2e-36:
        assert ((back - x.float()).abs() <= x.float().abs() / 15).all()
    assert amax == BF16_MAX or not saturated_count(x, scale_K).any()


@pytest.mark.parametrize(
    ("bad", "said"), [(math.nan, "never observed"), (-1.0, "never observed"), (math.inf, "infinite")]
)
def test_an_unusable_amax_is_refused_by_layer_and_head(bad: float, said: str) -> None:
    v_amax = AMAX.clone()
    v_amax[1, 2] = bad
    with pytest.raises(ValueError, match=rf"amax of V in layer 1, head 2 was {said}"):
        kv_scales_from_amax(torch.cat((AMAX, v_amax), 1), SPEC, policy_version=0)


def test_same_bits() -> None:
    scales = kv_scales_from_amax(torch.cat((AMAX, AMAX), 1), SPEC, policy_version=3)
    copy = KVScales(scales.scale_LS.clone(), 3)
    assert same_bits(scales, copy)
    assert not same_bits(scales, KVScales(copy.scale_LS, 4))
    copy.scale_LS[0, 3] = torch.nextafter(copy.scale_LS[0, 3], torch.tensor(1e9))
    assert not same_bits(scales, copy)
    assert not same_bits(scales, KVScales(scales.scale_LS[:1], 3))
