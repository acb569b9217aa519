"""Latent attention's fused form for training on a GPU: forward, and the backward written out.

    q = n Wq (or norm(n Wqa) Wqb);  kv_a = n Wkva;  out = attention(rotate(q), cached(norm(kv_a)));  result = out Wo
    dq, dlatent, dkey, dWkvb = attention'(dresult Wo^T)                                  absorbed.py
    dkv_a = norm'(dlatent), rotate'(dkey);  dn = dkv_a Wkva^T + rotate'(dq) Wq^T, and the gradients of the weights

Saved: n, q, kv_a and the queries' latent, all before norms and rotation, which the backward repeats. Costly: out.

T tokens, E hidden size, H heads, V = H * value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.kernels.profiler_parts import part
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward
from octetrl.kernels.rows.rope import rotate
from octetrl.layers.linear import Projection
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.mla.absorbed import attend_packed, attention_gradients
from octetrl.models.blocks.mla.module import LatentAttention, Projected
from octetrl.models.blocks.products import Input, dgrad, gradient_of, input_of, product, wgrad, wgrad_input
from octetrl.models.blocks.saved import Gradients, Saved


@dataclass(slots=True)
class SavedLatentAttention(Saved):
    """`costly` is the output of all heads, [T, V]."""

    n_TE: Tensor
    projected: Projected
    inputs: TrainingInputs


def begin(
    mla: LatentAttention, n: Input, inputs: TrainingInputs, *, costly: Tensor | None, observe: bool
) -> SavedLatentAttention:
    """`observe`: nothing of the latents is calibrated."""
    n_TE = n.rows
    assert isinstance(n_TE, Tensor), "several ops read the norm's result, so it comes as it is"
    projected = mla.project(n_TE, _multiply)
    if costly is None:
        with part("rows"):
            operands = mla.split(projected, inputs.rotary)
            value_TC = mla.as_cached(operands.latent_TC, inputs.context)
        with part("attention_forward"):
            q_THN, q_THR, _, key_TR = operands
            attended = attend_packed(
                q_THN, q_THR, value_TC, key_TR, mla.kv_b_proj.weight, mla.sizes, inputs.context, mla.softmax_scale
            )
        costly = attended.out_TV
        if mla.probe is not None:
            mla.probe_all(projected, operands.q_THR, (value_TC, key_TR), attended, None)
    return SavedLatentAttention(n_TE=n_TE, projected=projected, inputs=inputs, costly=costly)


def finish(mla: LatentAttention, saved: SavedLatentAttention) -> Tensor:
    out_TE = _multiply(mla.o_proj, saved.costly)
    if mla.probe is not None:
        mla.probe(mla.layer, "o_proj", out_TE)
    return out_TE


def backward(mla: LatentAttention, saved: SavedLatentAttention, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    projected, rotary, kv_b = saved.projected, saved.inputs.rotary, mla.kv_b_proj.weight
    dout_TV = _through(mla.o_proj, "o_proj", saved.costly, dout_TE.contiguous(), gradients)
    with part("rows"):
        q_THN, q_THR, latent_TC, key_TR = mla.split(projected, rotary)
        value_TC = mla.as_cached(latent_TC, saved.inputs.context)
    with part("attention_backward"):
        found = attention_gradients(
            dout_TV, q_THN, q_THR, value_TC, key_TR, kv_b, mla.sizes, saved.inputs.context, mla.softmax_scale
        )
    gradients["kv_b_proj.weight"] = found.kv_b
    norm, before_TC = mla.kv_a_layernorm, projected.kv_a_TX[:, : mla.latent_size]
    with part("rows"):
        dlatent_TC, gradients["kv_a_layernorm.weight"] = rms_norm_backward(
            found.latent_TC, before_TC, norm.weight, norm.eps
        )
        dkey_TR = rotate(found.key_TR.unsqueeze(1), *rotary, -1, mla.interleaved).squeeze(1)
        dq_THR = rotate(found.q_THR, *rotary, -1, mla.interleaved)
        dq_TX = torch.cat((found.q_THN, dq_THR), 2).flatten(1)
        dkv_a_TX = torch.cat((dlatent_TC, dkey_TR), 1)
    of_latent_TE = _through(mla.kv_a_proj_with_mqa, "kv_a_proj_with_mqa", saved.n_TE, dkv_a_TX, gradients)
    return _through_queries(mla, saved, dq_TX, gradients).add_(of_latent_TE)


def _through_queries(mla: LatentAttention, saved: SavedLatentAttention, dq_TX: Tensor, gradients: Gradients) -> Tensor:
    """The gradient of n by way of the queries."""
    if mla.q_proj is not None:
        return _through(mla.q_proj, "q_proj", saved.n_TE, dq_TX, gradients)
    norm, q_a_TA = mla.q_a_layernorm, saved.projected.q_a_TA
    assert mla.q_a_proj is not None and mla.q_b_proj is not None and norm is not None and q_a_TA is not None
    dnormed_TA = _through(mla.q_b_proj, "q_b_proj", norm(q_a_TA), dq_TX, gradients)
    with part("rows"):
        dq_a_TA, gradients["q_a_layernorm.weight"] = rms_norm_backward(dnormed_TA, q_a_TA, norm.weight, norm.eps)
    return _through(mla.q_a_proj, "q_a_proj", saved.n_TE, dq_a_TA, gradients)


def _multiply(linear: Projection, x: Tensor) -> Tensor:
    with part("quantize"):
        operand = input_of(linear, x, for_wgrad=False)
    return product(linear, operand)


def _through(linear: Projection, name: str, x_TK: Tensor, dy_TN: Tensor, gradients: Gradients) -> Tensor:
    """The gradient of `linear`'s input x; adds those of its weights."""
    with part("quantize"):
        dy, x = gradient_of(linear, dy_TN), wgrad_input(linear, x_TK)
    wgrad(gradients, name, linear, dy, x)
    return dgrad(linear, dy)
