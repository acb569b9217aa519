"""Latent attention's fused form for rollout on a GPU: the definition's ops with the products of the fused forms,
and one kernel between projections and attention.

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octetrl.models.blocks.products import Operand, project

if TYPE_CHECKING:
    from octetrl.models.blocks.block import RolloutInputs
    from octetrl.models.blocks.mla.module import LatentAttention


def rollout(mla: LatentAttention, x: Operand, inputs: RolloutInputs) -> Tensor:
    assert isinstance(x, Tensor), "several ops read the norm's result, so it is not quantised"
    projected = mla.project(x, project)
    q_THN, q_THR = mla.prepare_paged(projected, inputs.angles, inputs.context)
    attended = mla.attend_paged(q_THN, q_THR, inputs.context)
    out_TE = project(mla.o_proj, attended.out_TV)
    if mla.probe is not None:
        mla.probe_all(projected, q_THR, mla.read_back(inputs.context), attended, out_TE)
    return out_TE
