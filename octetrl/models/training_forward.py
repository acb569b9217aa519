"""The decoder's training on a GPU: each layer is one autograd node with its backward written out.

Forward, with the kernels and therefore the bits of `rollout_forward`; A and M are the layer's blocks (models/blocks/):

    n1 = norm(h0);  h1 = h0 + A(n1)
    n2 = norm(h1);  h2 = h1 + M(n2)

Backward, from dh2 and the saved part of the forward:

    dh1 = dh2 + norm'(M'(dh2))
    dh0 = dh1 + norm'(A'(dh1))

A chain of modules under autograd reads and writes memory between any two of them. Here every FP8 operand is quantised
in one read, if possible by the kernel that computes it, into codes along rows (forward, dgrad) and along tokens
(wgrad). Gradients of the gated unit exist only as codes. The kernel of the norm's gradient adds the residual's.

`Keep` sets what is saved for the backward. Bytes per token and layer, for attention and a gated MLP:

    layer        h0                       2 E                 the backward runs the layer again, except down_proj
    attention    h0, out, its lse         2 E + 2 H D + 4 H   the same, except attention and down_proj
    everything   h0, h1, qkv, out, lse, gate_up, and n1, n2 as operands of wgrad
                                          4 E + 2 X + 2 H D + 4 H + 4 F + 2 E (FP8, as codes) or + 4 E (BF16)

A layer that runs again has the same bits, because nothing in it is random and no sum depends on other work. Saved codes
for wgrad equal those of quantising again (tests/gpu/test_training_forward.py). They take half the memory of the values.

With adapters (layers/lora.py) the weights are frozen and have no gradient. The linears' inputs stay in BF16 for the
branch. The branch is added to the product in place, and wgrad computes the gradients of A and B.

T tokens, E hidden size, F intermediate size, H query heads, K kv heads, D head size, X = (H + 2 K) D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octetrl.kernels.profiler_parts import part
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward
from octetrl.layers.context import Context, PackedContext
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.products import normed
from octetrl.models.blocks.saved import Gradients, Saved
from octetrl.models.decoder import Decoder, DecoderLayer, Half, RunLayer
from octetrl.models.rollout_forward import can_fuse

Keep = Literal["nothing", "layer", "attention", "everything"]


def fused_layer_runner(model: Decoder, keep: Keep) -> RunLayer | None:
    """The `run_layer` of `Decoder.forward`. None if model or device cannot use the fused forms; a part never can."""
    if not model.lm_head_weight.is_cuda or not can_fuse(model) or model.group.size > 1:
        return None
    return partial(_run_layer, keep=keep)


def _run_layer(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context, *, keep: Keep) -> Tensor:
    assert isinstance(layer, DecoderLayer) and isinstance(context, PackedContext)
    if not torch.is_grad_enabled():
        keep = "nothing"
    inputs = TrainingInputs(rotary, context)
    out_TE: Tensor = _Layer.apply(hidden_TE, layer, inputs, keep, *layer.parameters())
    return out_TE


@dataclass(slots=True)
class _Activations:
    """The part of a forward that the backward reads, up to the end of the last block."""

    first: Saved
    h1_TE: Tensor
    second: Saved


Costly = tuple[Any, Any]  # of the two blocks


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h0_TE: Tensor, layer: DecoderLayer, inputs: TrainingInputs, keep: Keep, *parameters: Tensor
    ) -> Tensor:
        activations = _up_to_the_end(layer, h0_TE, inputs, for_wgrad=keep == "everything", observe=True)
        h2_TE = layer.mlp.finish(activations.second)
        with part("rows"):
            h2_TE.add_(activations.h1_TE)
        ctx.save_for_backward(h0_TE, *parameters)  # autograd then notices a parameter that changes before the backward
        blocks = activations.first, activations.second
        for saved in blocks:
            saved.made_with_costly = None
        ctx.layer, ctx.inputs = layer, inputs
        ctx.activations = activations if keep == "everything" else None
        ctx.costly = tuple(saved.costly for saved in blocks) if keep == "attention" else (None, None)
        return h2_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h0_TE = ctx.saved_tensors[0]
        layer: DecoderLayer = ctx.layer
        activations: _Activations | None = ctx.activations
        if activations is None:
            activations = _up_to_the_end(layer, h0_TE, ctx.inputs, for_wgrad=True, costly=ctx.costly)
        ctx.activations = ctx.costly = None  # freed as the backward goes on
        gradients: Gradients = {}
        first, second = layer.halves
        dh1_TE = _half_backward(second, activations.second, activations.h1_TE, grads[0], gradients)
        dh0_TE = _half_backward(first, activations.first, h0_TE, dh1_TE, gradients)
        return dh0_TE, None, None, None, *[gradients.get(name) for name, _ in layer.named_parameters()]


def _up_to_the_end(
    layer: DecoderLayer,
    h0_TE: Tensor,
    inputs: TrainingInputs,
    *,
    for_wgrad: bool,
    observe: bool = False,
    costly: Costly = (None, None),
) -> _Activations:
    """The layer's forward except the end of its last block. `observe`: this is the first run. `costly`: values saved
    from the first run, which are not recomputed."""
    first, second = layer.halves
    n1 = normed(h0_TE, first.norm, first.block.reader, for_wgrad)
    saved_first = first.block.begin(n1, inputs, costly=costly[0], observe=observe)
    h1_TE = first.block.finish(saved_first)  # without h0, which the norm adds
    n2 = normed(h1_TE, second.norm, second.block.reader, for_wgrad, add_TE=h0_TE)
    if layer.probe is not None:
        layer.probe_stream(n1.rows, h1_TE, n2.rows)
    saved_second = second.block.begin(n2, inputs, costly=costly[1], observe=observe)
    return _Activations(saved_first, h1_TE, saved_second)


def _half_backward(half: Half, saved: Saved, h_TE: Tensor, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    """The gradient of the residual stream before the norm (`h_TE`), from the gradient after the block."""
    place, norm, block = half
    of_block: Gradients = {}
    dn_TE = block.backward(saved, dout_TE, of_block)
    with part("rows"):
        dh_TE, dnorm_E = rms_norm_backward(dn_TE, h_TE, norm.multiplier, norm.eps, dout_TE)
    gradients |= {f"{place.name}.{name}": gradient for name, gradient in of_block.items()}
    gradients[f"{place.norm}.weight"] = dnorm_E
    return dh_TE
