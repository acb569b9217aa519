"""RoPE and its table against transformers' and a float64 reference."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octetrl.kernels.rows.rope import rope, rope_reference, rope_triton
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.shapes.rope import Llama3Scaling

HEAD_SIZE, THETA = 32, 500_000.0


def _table(scaling: Llama3Scaling | None = None, max_positions: int = 4096) -> RotaryTable:
    return RotaryTable(HEAD_SIZE, THETA, scaling, max_positions, device="cpu")


def _heads(num_tokens: int = 6, num_heads: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_equals_transformers_with_and_without_scaling() -> None:
    positions_T = torch.tensor([0, 1, 5, 100, 1000, 4095])
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=512)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs_of = {
        None: {"rope_type": "default", "rope_theta": THETA},
        scaling: {**llama3, "rope_theta": THETA, "original_max_position_embeddings": 512},
    }
    x_THD = _heads()
    for spec, parameters in theirs_of.items():
        config = LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            head_dim=HEAD_SIZE,
            max_position_embeddings=4096,
            rope_parameters=parameters,
        )
        cos, sin = LlamaRotaryEmbedding(config)(x_THD, positions_T[None])
        theirs, _ = apply_rotary_pos_emb(x_THD.transpose(0, 1)[None], x_THD.transpose(0, 1)[None], cos, sin)
        ours_THD = rope(x_THD, *_table(spec)(positions_T))
        torch.testing.assert_close(ours_THD, theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-3)


def test_angles_are_exact_far_from_the_start() -> None:
    position = 4095
    cos_TR, sin_TR = _table()(torch.tensor([position]))
    angle_R = position * THETA ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE)
    assert torch.equal(cos_TR[0], angle_R.cos().float()) and torch.equal(sin_TR[0], angle_R.sin().float())


def test_keeps_lengths_and_relative_positions() -> None:
    table = _table()
    q_THD, k_THD = _heads(1).double().float(), _heads(2)[1:]
    near = rope(q_THD, *table(torch.tensor([7]))) * rope(k_THD, *table(torch.tensor([3])))
    far = rope(q_THD, *table(torch.tensor([1007]))) * rope(k_THD, *table(torch.tensor([1003])))
    torch.testing.assert_close(near.sum(-1), far.sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope(q_THD, *table(torch.tensor([99]))).norm(dim=-1), q_THD.norm(dim=-1))


def test_gradient_is_the_rotation_back() -> None:
    rotary: Rotary = _table()(torch.arange(6))
    x_THD = _heads().requires_grad_()
    dy_THD = _heads().flip(0)
    rope(x_THD, *rotary).backward(dy_THD)
    reference_THD = x_THD.detach().clone().requires_grad_()
    rope_reference(reference_THD, *rotary).backward(dy_THD)
    assert x_THD.grad is not None
    torch.testing.assert_close(x_THD.grad, reference_THD.grad, rtol=1e-6, atol=1e-7)


def test_interleaved_pairs_are_those_of_deepseek_and_rotate_back() -> None:
    """The result has the order of halves, so a score is that of transformers."""
    rotary = _table()(torch.arange(6))
    x_THD = _heads().requires_grad_()
    cos_TD, sin_TD = (torch.cat((half_TR, half_TR), 1) for half_TR in rotary)
    want, _ = apply_rotary_pos_emb_interleave(x_THD[None], x_THD[None], cos_TD[None], sin_TD[None], unsqueeze_dim=2)
    y_THD = rope(x_THD, *rotary, True)
    torch.testing.assert_close(y_THD, want[0], rtol=1e-6, atol=1e-6)
    y_THD.backward(y_THD.detach())
    torch.testing.assert_close(x_THD.grad, x_THD.detach(), rtol=1e-5, atol=1e-6)


def test_a_strided_view_and_bfloat16() -> None:
    rotary = _table()(torch.arange(6))
    fused_THD = _heads(num_heads=5, dtype=torch.bfloat16)
    view_THD = fused_THD[:, 1:4]
    assert torch.equal(rope(view_THD, *rotary), rope(view_THD.contiguous(), *rotary))
    exact_THD = rope(view_THD.float(), *rotary)
    assert torch.equal(rope(view_THD, *rotary), exact_THD.bfloat16())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_has_the_bits_of_the_reference(sign: int, interleaved: bool) -> None:
    rotary = _table()(torch.tensor([0, 3, 4095, 17, 1, 2]))
    arguments = _heads(num_heads=5)[:, 1:4], *rotary, sign, interleaved
    assert torch.equal(rope_triton(*arguments), rope_reference(*arguments))
