"""Where the adapters of LoRA lie and how large they are, from the recipe's words and the model's shape. No torch.

Our projections are fused (q, k, v and gate, up in one), PEFT's are not: a fused projection has one branch, whose
*parts* are the projections by their Hugging Face names, each a range of the fused one's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octetrl.config.blocks import LinearLayout
from octetrl.config.schema import LoraConfig
from octetrl.config.spec import ModelSpec


class LoraPart(NamedTuple):
    """Rows `start ... stop` of a fused projection: `q_proj` in `attention.qkv_proj`."""

    name: str
    start: int
    stop: int


def lora_parts(linear: LinearLayout, targets: Sequence[str]) -> tuple[LoraPart, ...]:
    """The parts of `linear` that are targets, in the order of its rows."""
    start, parts = 0, []
    for name, rows in linear.parts:
        if name in targets:
            parts.append(LoraPart(name, start, start + rows))
        start += rows
    return tuple(parts)


def adapter_elements(spec: ModelSpec, lora: LoraConfig) -> int:
    """Trained parameters: for each target of each layer an A [rank, in] and a B [out, rank]."""
    return lora.rank * sum(
        linear.in_features + part.stop - part.start
        for _, linear in spec.linears()
        for part in lora_parts(linear, lora.targets)
    )
