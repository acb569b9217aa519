"""The mixture in a rollout's forward: the experts as one node (experts.py), and the shared expert's fused form.

The router reads x in the model's dtype. Experts and shared expert read its codes, if they are FP8; the norm in front
stores both (blocks/normed.py). The next norm's kernel adds up the experts of a token.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.rows.combine_experts import ExpertSum
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.mlp.rollout import rollout as mlp_rollout
from octetrl.models.blocks.moe.module import MixtureOfExperts
from octetrl.models.blocks.normed import Normed, operand_of, values_of


def rollout(moe: MixtureOfExperts, x: Normed, inputs: RolloutInputs) -> Tensor | ExpertSum:
    shared, of_experts = moe.shared_experts, operand_of(moe.experts.gate_up_proj, x)
    shared_TE = None if shared is None else mlp_rollout(shared, operand_of(shared.gate_up_proj, x), inputs)
    codes = of_experts if isinstance(of_experts, Quantized) else None
    mixed = moe.summands(values_of(x), shared_TE, fused=True, codes=codes)
    if moe.probe is not None:
        return moe.sum_of(mixed)
    return ExpertSum(mixed.down_PE, mixed.routes.weight_TS, mixed.groups.row_TS, mixed.shared_TE)
