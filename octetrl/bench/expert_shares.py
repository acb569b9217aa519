"""Loads of experts by Zipf's law: the expert of rank r has a share of the tokens proportional to r^-S. No torch.

A token meets an expert at most once. An expert that would have more rows than there are tokens has all tokens, and the
others share the rest by the same law. S = 0: all experts have the same load.
"""

from __future__ import annotations

from functools import cache

from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


@cache
def expert_shares(experts: int, chosen: int, exponent: float) -> tuple[float, ...]:
    """The share of all tokens that each expert has, by rank; their sum is `chosen`, none is above 1."""
    weights = [rank**-exponent for rank in range(1, experts + 1)]
    full = 0  # experts that have every token
    while full < experts:
        unit = (chosen - full) / sum(weights[full:])
        if unit * weights[full] <= 1.0:
            return (*[1.0] * full, *(unit * weight for weight in weights[full:]))
        full += 1
    return (1.0,) * experts


def check_skew(exponent: float, model: str, spec: ModelSpec) -> None:
    """Raise UserError if the model has no experts to skew."""
    if exponent and not spec.has_experts:
        raise UserError(
            f"--router-skew: {model} is a dense model and has no router; give a mixture of experts, such as"
            " qwen3-30b-a3b, or leave it out"
        )
