"""Which projections get LoRA adapters and how large they are, from the recipe and the model's shape. No torch.

Our projections are fused: q, k and v are one, gate and up are one. PEFT's projections are separate. A fused projection
has one branch with several *parts*. Each part is a range of its rows, named like the Hugging Face projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octetrl.config.schema import LoraConfig
from octetrl.shapes.blocks import LinearLayout, StackedLinearLayout
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import nearest


class LoraPart(NamedTuple):
    """Rows `start ... stop` of a fused projection: `q_proj` in `attention.qkv_proj`."""

    name: str
    start: int
    stop: int


def adaptable(spec: ModelSpec) -> Iterator[tuple[str, LinearLayout]]:
    """Yield what may have an adapter, with its full name: all linears, and matrices that are adapted if named."""
    for name, block in spec.named_blocks():
        for linear in block.adaptable(spec):
            yield f"{name}.{linear.name}", linear


def projections(spec: ModelSpec, *, experts: bool = False) -> tuple[str, ...]:
    """List the projections of the model's layers, each once, in order. `experts`: include those of stacked linears."""
    linears = [linear for _, linear in spec.linears() if experts or not isinstance(linear, StackedLinearLayout)]
    return tuple(dict.fromkeys(part.name for linear in linears for part in linear.parts))


def targets_of(lora: LoraConfig, spec: ModelSpec) -> tuple[str, ...]:
    """List the projections that get an adapter."""
    return projections(spec, experts=lora.experts) if lora.targets is None else lora.targets


def unknown_target(targets: Sequence[str], spec: ModelSpec) -> str | None:
    """Describe the first target that this model does not have, and the allowed ones. None: the model has all."""
    matrices = {matrix.module: matrix for block in spec.distinct_blocks for matrix in block.matrices(spec)}
    known = (*projections(spec, experts=True), *(name for name, matrix in matrices.items() if matrix.adaptable))
    for target in targets:
        if target not in known:
            if target in matrices and (why := matrices[target].why_not_adapted):
                return f"'{target}' can't have an adapter, because {why}; choose of {', '.join(known)}"
            return f"'{target}' is not allowed; choose one of {', '.join(known)}{nearest(target, known)}"
    return None


def lora_parts(linear: LinearLayout, lora: LoraConfig) -> tuple[LoraPart, ...]:
    """List the parts of `linear` that are targets, in the order of its rows. Of a stacked linear: of each matrix."""
    start, parts = 0, []
    if isinstance(linear, StackedLinearLayout) and not lora.experts:
        return ()
    for name, rows in linear.parts:
        if not linear.adapted_if_named if lora.targets is None else name in lora.targets:
            parts.append(LoraPart(name, start, start + rows))
        start += rows
    return tuple(parts)


def adapter_elements(spec: ModelSpec, lora: LoraConfig) -> int:
    """Count the trained parameters: an A [rank, in] and a B [out, rank] for each target of each layer (and expert)."""
    return lora.rank * sum(
        (linear.in_features + part.stop - part.start) * (linear.count if isinstance(linear, StackedLinearLayout) else 1)
        for _, linear in adaptable(spec)
        for part in lora_parts(linear, lora)
    )
