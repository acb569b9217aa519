"""The gradient of latent attention: reference and interpreted kernels against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.attention import latent_backward
from octetrl.kernels.attention.attention_packed_backward import Tile
from octetrl.kernels.attention.latent_backward import LatentGradients, LatentTiles
from tests.unit.kernels.latent_gradient_cases import SCALE, Arguments, cu_seqlens, draw, errors, written_out

SMALL = LatentTiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
COARSE = LatentTiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
CASES = {  # lengths, rows past them, heads, tiles
    "ragged": ((1, 37, 64, 40), 5, 2, SMALL),
    "an empty sequence": ((33, 0, 32), 0, 1, COARSE),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_derivative(name: str) -> None:
    lengths, rest, heads, _ = CASES[name]
    arguments = draw(sum(lengths) + rest, heads, torch.float32)
    found = latent_backward.latent_backward(*arguments, cu_seqlens(lengths), max(lengths), SCALE)
    assert max(errors(found, written_out(arguments, lengths))) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_it_and_nothing_crosses_over(name: str) -> None:
    """Rows past the sequences are NaN here: what a tile reads of them must not reach a sequence."""
    lengths, rest, heads, tiles = CASES[name]
    used = sum(lengths)
    arguments = draw(used + rest, heads)
    want = written_out(Arguments(*(x[:used] for x in arguments)), lengths)
    for x in arguments:
        x[used:] = float("nan")
    found = latent_backward.latent_backward_triton(*arguments, cu_seqlens(lengths), SCALE, tiles=tiles)
    assert max(errors(LatentGradients(*(x[:used] for x in found)), want)) < 1e-2
    assert not any(x[used:].count_nonzero() for x in found)
