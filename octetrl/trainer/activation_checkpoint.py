"""Activation checkpointing: keep the input of each layer, run the layer again in the backward.

Memory of a micro-batch falls from everything a layer saves to T * E values a layer, plus one layer's worth at a time;
the price is one more forward, about a third of the step's arithmetic. Gradients are identical to the bit, because a
layer is deterministic: there is no dropout, so no random state needs restoring.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octetrl.layers.context import Context
from octetrl.layers.rotary import Rotary
from octetrl.models.decoder import RunLayer


def layer_runner(mode: Literal["none", "layer"]) -> RunLayer | None:
    """What `Decoder.forward` takes as `run_layer`; None runs layers plainly."""
    return run_checkpointed if mode == "layer" else None


def run_checkpointed(layer: nn.Module, hidden_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
    output_TE: Tensor = checkpoint(layer, hidden_TE, rotary, context, use_reentrant=False, preserve_rng_state=False)
    return output_TE
