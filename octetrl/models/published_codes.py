"""Which linears of a block-FP8 folder have codes and scales that this project can use as they are. No torch.

Frozen weights (the base of adapters) are never quantised again, so the publisher's codes are the better ones: to
dequantise to BF16 and quantise again would round twice. Weights that are trained are quantised from BF16 after every
update; theirs are quantised again from the start, so that a resumed run has the bits of an uninterrupted one.

Our scales belong to 128 x 128 blocks of the fused weight. A tensor of the folder fits if it begins where a block does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from octetrl.config.schema import Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.weight_files import (
    BLOCK_SCALES,
    CODES,
    SCALE_BLOCK,
    FilePiece,
    TensorHeader,
    checked_headers,
    pieces,
    scale_layout,
)
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


class PublishedCodes(NamedTuple):
    """Linears by name."""

    fitting: Mapping[str, tuple[FilePiece, ...]]  # with the folder's tensors
    ragged: Collection[str]  # a tensor begins inside one of our blocks


def published_codes(spec: ModelSpec, headers: Mapping[str, TensorHeader], *, scalar: bool = False) -> PublishedCodes:
    """The linears of a whole model whose tensors are all codes."""
    by_linear: dict[str, list[FilePiece]] = {}
    for piece in pieces(spec, scalar=scalar, held=headers):
        if piece.is_linear:
            by_linear.setdefault(piece.parameter.removesuffix(".weight"), []).append(piece)
    fitting, ragged = {}, []
    for name, linear in spec.linears():
        own = by_linear[name]
        if any(headers[piece.name].dtype != CODES for piece in own):
            continue
        if any(piece.start % linear.out_features % SCALE_BLOCK for piece in own):
            ragged.append(name)
        else:
            fitting[name] = tuple(own)
    return PublishedCodes(fitting, ragged)


def takes_published_codes(recipe: Recipe) -> bool:
    """Whether a run's frozen weights keep the codes of `model.path`."""
    model = recipe.model
    pretrained = model.path is not None and model.init != "random"
    alike = not recipe.fp8.power_of_two and recipe.fp8.format == "block"
    return pretrained and model.lora is not None and alike and recipe.cluster.tensor_parallel == 1


def describe_published_codes(recipe: Recipe, spec: ModelSpec) -> str | None:
    """A sentence on the codes of `model.path`. None: it has none, or no linear of the run's trainer is FP8."""
    scalar = recipe.algorithm.name == "reward_model"
    if recipe.model.path is None or recipe.model.init == "random":
        return None
    try:
        headers = checked_headers(Path(recipe.model.path), spec, scalar=scalar, new_head=scalar)
    except UserError:  # which is reported elsewhere
        return None
    if scale_layout(recipe.model.path).block != BLOCK_SCALES.block:
        return "MXFP8, dequantised to BF16 and quantised again"
    found = published_codes(spec, headers, scalar=scalar)
    fp8 = {linear.name for linear in precision_policy(spec, recipe.fp8).linears if linear.train == "fp8"}
    taken, ragged = fp8 & found.fitting.keys(), fp8 & set(found.ragged)
    if not taken and not ragged:
        return None
    if not takes_published_codes(recipe):
        why = "power-of-two scales are asked for" if recipe.fp8.power_of_two else "training changes the weights"
        why = "MXFP8 has other blocks" if recipe.fp8.format == "mxfp8" else why
        return f"block-FP8, dequantised to BF16 and quantised again: {why}"
    again = f"; {len(ragged)} are quantised again, as their tensors begin inside our blocks" if ragged else ""
    return f"block-FP8, {len(taken)} linears keep the folder's codes{again}"
