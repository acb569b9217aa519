"""The decoder's forward for rollout on a GPU, with fused ops between the GEMMs.

    add + RMSNorm (+ quantise)        -> the operand of the block's first linear
    the block's rollout form          -> the addend of the next norm's residual stream        twice a layer

Each fused kernel has the bits of the ops that it replaces, so the result equals `Decoder.forward` bit for bit
(tests/gpu). There are no gradients. The input of a linear with an adapter stays in BF16 and is quantised separately,
because the branch reads it too (layers/lora.py). Nothing here waits for the host, so all of it can be captured.

T tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.fp8.backends import FUSED
from octetrl.layers.context import PagedContext
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.normed import add_norm, stored_form
from octetrl.models.decoder import EMBEDDING_SITE, FINAL_NORM_SITE, Decoder


def can_fuse(model: Decoder) -> bool:
    """Whether a GPU can run the fused rollout of this model: it is in BF16, and no FP8 linear is emulated."""
    fits = model.has_fused_forms and model.dtype == torch.bfloat16
    return fits and all(linear.backend in FUSED for _, linear in model.float8_linears())


@torch.no_grad()
def rollout_forward(model: Decoder, token_ids_T: Tensor, positions_T: Tensor, context: PagedContext) -> Tensor:
    """Hidden states [T, E] after the final norm. token_ids_T and positions_T: int64."""
    probe = model.probe
    hidden_TE = model.embedding(token_ids_T)
    if probe is not None:
        probe(None, EMBEDDING_SITE, hidden_TE)
    delta, behind = None, (0, "")  # the next norm's `Addend`; layer and site of the sum
    inputs = RolloutInputs(model.rotary, positions_T, context)
    for index, layer in enumerate(model.decoder_layers()):
        for place, norm, block in layer.halves:
            hidden_TE, x = add_norm(delta, hidden_TE, norm, block)
            if probe is not None:
                if delta is not None:
                    probe(*behind, hidden_TE)
                probe(index, place.norm_site, stored_form(x))
            delta, behind = block.rollout(x, inputs), (index, place.residual_site)
    hidden_TE, normed = add_norm(delta, hidden_TE, model.norm, None)
    assert isinstance(normed, Tensor)
    if probe is not None:
        probe(*behind, hidden_TE)
        probe(None, FINAL_NORM_SITE, normed)
    return normed
