"""The decoder as a GPU runs it for rollout: the layers of `models/decoder.py`, fused where memory is what costs.

    add + RMSNorm (+ quantise)        -> what the block's first linear multiplies
    the block's rollout form          -> what the next norm adds to the residual stream        twice a layer

Each fused kernel gives the bits of the ops it replaces, so this is `Decoder.forward` to the bit (tests/gpu), without
gradients and without its modules' separate passes over memory. Where a linear has an adapter, its input is made in BF16
and quantised by itself: the branch reads it too (layers/lora.py). Nothing here reads the host: it is captured whole.

T tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.layers.context import PagedContext
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.products import add_norm
from octetrl.models.decoder import EMBEDDING_SITE, FINAL_NORM_SITE, Decoder


def can_fuse(model: Decoder) -> bool:
    """Whether the kernels here know this model, on a GPU: in BF16, its FP8 linears not emulated."""
    if model.dtype != torch.bfloat16:
        return False
    return all(linear.backend == "scaled_mm" for _, linear in model.float8_linears())


@torch.no_grad()
def rollout_forward(model: Decoder, token_ids_T: Tensor, positions_T: Tensor, context: PagedContext) -> Tensor:
    """Hidden states [T, E] after the final norm. token_ids_T and positions_T: int64."""
    probe = model.probe
    hidden_TE = model.embedding(token_ids_T)
    if probe is not None:
        probe(None, EMBEDDING_SITE, hidden_TE)
    delta_TE, behind = None, (0, "")  # what the next norm adds; layer and site of the sum
    inputs = RolloutInputs(model.rotary, positions_T, context)
    for index, layer in enumerate(model.decoder_layers()):
        for place, norm, block in layer.halves:
            hidden_TE, x = add_norm(delta_TE, hidden_TE, norm, block.reader)
            if probe is not None:
                if delta_TE is not None:
                    probe(*behind, hidden_TE)
                probe(index, place.norm_site, x)
            delta_TE, behind = block.rollout(x, inputs), (index, place.residual_site)
    hidden_TE, normed = add_norm(delta_TE, hidden_TE, model.norm, None)
    assert isinstance(normed, Tensor)
    if probe is not None:
        probe(*behind, hidden_TE)
        probe(None, FINAL_NORM_SITE, normed)
    return normed
