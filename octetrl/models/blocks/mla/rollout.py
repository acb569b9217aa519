"""Latent attention's fused form for rollout on a GPU: the definition's ops with the products of the fused forms,
and one kernel between projections and attention.

The norm in front stores its result for `kv_a` and its codes for the queries (blocks/normed.py). The norm of the
queries' latent stores only what `q_b` reads, and the last product before `o_proj` only what that reads.

T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.layers.linear import Projection
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.mla.absorbed import expand_codes
from octetrl.models.blocks.mla.module import LatentAttention
from octetrl.models.blocks.normed import Normed, norm_for, operand_of
from octetrl.models.blocks.products import project, wants_codes


def rollout(mla: LatentAttention, x: Normed, inputs: RolloutInputs) -> Tensor:
    projected = mla.project(x, _multiply, norm_for)
    q_THN, q_THR = mla.prepare_paged(projected, inputs.angles, inputs.context)
    quantize, power_of_two = wants_codes(mla.o_proj)
    if quantize and mla.probe is None:
        _, o_THC = mla.attend_latents(q_THN, q_THR, inputs.context)
        return project(mla.o_proj, expand_codes(o_THC, mla.kv_b_proj.weight, mla.sizes, power_of_two))
    attended = mla.attend_paged(q_THN, q_THR, inputs.context)
    out_TE = project(mla.o_proj, attended.out_TV)
    if mla.probe is not None:
        mla.probe_all(projected, q_THR, mla.read_back(inputs.context), attended, out_TE)
    return out_TE


def _multiply(linear: Projection, x: Normed) -> Tensor:
    return project(linear, operand_of(linear, x))
