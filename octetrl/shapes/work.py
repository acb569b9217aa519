"""How much a model multiplies: for one token, and for one pair of query and key. No torch.

A dense model multiplies a token by all weights of its layers; a mixture by its router's and those of the chosen
experts. Embedding and lm_head do not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.shapes.blocks import BlockLayout, LinearLayout, MatrixLayout, PairProducts
from octetrl.shapes.spec import ModelSpec


def token_weights(spec: ModelSpec) -> int:
    """Weights that one token is multiplied by, in all layers."""
    total = 0
    for block in _blocks(spec):
        for tensor in block.tensors(spec):
            if isinstance(tensor, LinearLayout):
                total += tensor.active_weights
            elif isinstance(tensor, MatrixLayout):
                total += tensor.num_parameters
    return total


def pair_products(spec: ModelSpec) -> PairProducts:
    """Multiplications of attention for one query and key, forward and backward, in all layers."""
    found = [block.pair_products(spec) for block in _blocks(spec)]
    return PairProducts(sum(pair.needed for pair in found), sum(pair.computed for pair in found))


def _blocks(spec: ModelSpec) -> Iterator[BlockLayout]:
    for layer in range(spec.num_layers):
        yield from spec.blocks_of(layer)
