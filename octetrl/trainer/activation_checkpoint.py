"""Activation checkpointing: which activations a layer keeps from forward to backward, and which it recomputes.

    none        keeps everything that the backward reads
    attention   keeps the layer's input, and attention's output with its log-sum-exp; attention runs once
    layer       keeps only the layer's input, T * E values; it costs one more forward, about a quarter of the step

The setting applies to the first `checkpointed_layers` layers of the model. The others keep everything.

On a GPU models/training_forward.py does this itself. Elsewhere torch checkpoints whole layers, and `attention` is the
same as `layer`. Gradients are identical to the bit: a layer is deterministic. There is no dropout, so no random state
needs restoring.

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octetrl.layers.context import Context
from octetrl.layers.rotary import Rotary
from octetrl.models.decoder import Decoder, RunLayer
from octetrl.models.training_forward import Keep, fused_layer_runner

ActivationCheckpointing = Literal["none", "attention", "layer"]
KEPT: dict[ActivationCheckpointing, Keep] = {"none": "everything", "attention": "attention", "layer": "layer"}


def layer_runner(
    model: Decoder, mode: ActivationCheckpointing, checkpointed_layers: int | None = None
) -> RunLayer | None:
    """The argument `run_layer` of `model.forward`; None calls the layers directly.

    `checkpointed_layers`: number of layers that `mode` applies to; None: all.
    """
    checkpointed = _one_for_all(model, mode)
    if checkpointed is None or mode == "none" or checkpointed_layers is None:
        return checkpointed
    first = set(model.layers[:checkpointed_layers])
    whole = _one_for_all(model, "none") or _run_plainly

    def run_layer(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        return (checkpointed if layer in first else whole)(layer, hidden_TE, rotary, context)

    return run_layer


def _one_for_all(model: Decoder, mode: ActivationCheckpointing) -> RunLayer | None:
    fused = fused_layer_runner(model, KEPT[mode])
    if fused is not None:
        return fused
    return None if mode == "none" else run_checkpointed


def _run_plainly(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
    output_TE: Tensor = layer(hidden_TE, rotary, context)
    return output_TE


def run_checkpointed(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
    """Run a layer that keeps only its input, [T, E], for the backward. Returns [T, E]."""
    if not torch.is_grad_enabled():
        return _run_plainly(layer, hidden_TE, rotary, context)
    output_TE: Tensor = checkpoint(layer, hidden_TE, rotary, context, use_reentrant=False, preserve_rng_state=False)
    return output_TE
