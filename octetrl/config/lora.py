"""Where the adapters of LoRA lie and how large they are, from the recipe's words and the model's shape. No torch.

Our projections are fused (q, k, v and gate, up in one), PEFT's are not: a fused projection has one branch, whose
*parts* are the projections by their Hugging Face names, each a range of the fused one's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octetrl.config.schema import LoraConfig
from octetrl.config.spec import ModelSpec


class LoraPart(NamedTuple):
    """Rows `start ... stop` of a fused projection: `q_proj` in `attention.qkv_proj`."""

    name: str
    start: int
    stop: int


def lora_parts(spec: ModelSpec, targets: Sequence[str], linear: str) -> tuple[LoraPart, ...]:
    """The parts of `linear` ("attention.qkv_proj") that are targets, in the order of its rows."""
    start, parts = 0, []
    for name, rows in _rows(spec)[linear]:
        if name in targets:
            parts.append(LoraPart(name, start, start + rows))
        start += rows
    return tuple(parts)


def adapter_elements(spec: ModelSpec, lora: LoraConfig) -> int:
    """Trained parameters: for each target of each layer an A [rank, in] and a B [out, rank]."""
    in_features = {
        "attention.qkv_proj": spec.hidden_size,
        "attention.o_proj": spec.q_size,
        "mlp.gate_up_proj": spec.hidden_size,
        "mlp.down_proj": spec.intermediate_size,
    }
    each = sum(
        in_features[linear] + part.stop - part.start
        for linear in in_features
        for part in lora_parts(spec, lora.targets, linear)
    )
    return spec.num_layers * lora.rank * each


def _rows(spec: ModelSpec) -> dict[str, tuple[tuple[str, int], ...]]:
    return {
        "attention.qkv_proj": (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)),
        "attention.o_proj": (("o_proj", spec.hidden_size),),
        "mlp.gate_up_proj": (("gate_proj", spec.intermediate_size), ("up_proj", spec.intermediate_size)),
        "mlp.down_proj": (("down_proj", spec.hidden_size),),
    }
