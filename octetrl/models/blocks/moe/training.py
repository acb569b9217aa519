"""The mixture as a GPU trains it: router and experts under autograd inside the layer's one node.

The experts are one node (experts.py), and the shared expert has the gated MLP's own training form.

Saved: what autograd keeps of router and experts, and what the shared expert saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.mlp.training import SavedMLP
from octetrl.models.blocks.moe.module import MixtureOfExperts
from octetrl.models.blocks.products import Input, input_of
from octetrl.models.blocks.saved import Gradients, Saved


@dataclass(slots=True)
class SavedMixture(Saved):
    x_TE: Tensor  # a leaf
    shared_TE: Tensor | None  # a leaf: what the shared expert returned
    sum_TE: Tensor  # with its graph
    of_shared: SavedMLP | None


def begin(moe: MixtureOfExperts, n: Input, inputs: TrainingInputs, *, costly: Any, observe: bool) -> SavedMixture:
    assert isinstance(n.rows, Tensor), "several ops read the norm's result, so it comes as it is"
    of_shared = shared_TE = None
    if moe.shared_experts is not None:
        own = input_of(moe.shared_experts.gate_up_proj, n.rows, for_wgrad=True)
        of_shared = moe.shared_experts.begin(own, inputs, costly=None, observe=observe)
        shared_TE = moe.shared_experts.finish(of_shared).requires_grad_()
    with torch.enable_grad():
        x_TE = n.rows.detach().requires_grad_()
        sum_TE = moe.mix(x_TE, shared_TE, inputs.context.routers, fused=True)
    return SavedMixture(x_TE, shared_TE, sum_TE, of_shared)


def finish(moe: MixtureOfExperts, saved: SavedMixture) -> Tensor:
    return saved.sum_TE.detach().clone()  # the caller adds to it in place


def backward(moe: MixtureOfExperts, saved: SavedMixture, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    own = {
        name: parameter
        for name, parameter in moe.named_parameters()
        if parameter.requires_grad and not name.startswith("shared_experts.")
    }
    leaves = [saved.x_TE] if saved.shared_TE is None else [saved.x_TE, saved.shared_TE]
    found = torch.autograd.grad(saved.sum_TE, [*leaves, *own.values()], dout_TE)
    dx_TE = found[0]
    gradients |= zip(own, found[len(leaves) :], strict=True)
    if moe.shared_experts is not None and saved.of_shared is not None:
        of_shared: Gradients = {}
        dx_TE = dx_TE + moe.shared_experts.backward(saved.of_shared, found[1], of_shared)
        gradients |= {f"shared_experts.{name}": gradient for name, gradient in of_shared.items()}
    return dx_TE
