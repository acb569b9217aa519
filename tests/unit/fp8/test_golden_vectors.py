"""The plain-torch quantisers and the emulated GEMM still give the bytes that were written down."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.golden.make import PATH, golden_tensors

GOLDEN = load_file(PATH)


def test_bytes_are_those_written_down() -> None:
    made = golden_tensors()
    assert sorted(GOLDEN) == sorted(made)
    for name, golden in GOLDEN.items():
        assert made[name].dtype == golden.dtype and made[name].shape == golden.shape, name
        assert torch.equal(made[name].contiguous().view(torch.uint8), golden.view(torch.uint8)), name


def test_the_vectors_are_worth_keeping() -> None:
    """They hold zero blocks, ±448, subnormal scales and more than half of all codes."""
    codes, scale = GOLDEN["activation.float32.codes"], GOLDEN["activation.float32.scale"]
    assert len(codes.unique()) > 128 and {0x7E, 0xFE, 0x00, 0x80} <= set(codes.unique().tolist())
    assert (scale == 1.0).any() and (scale < torch.finfo(torch.float32).tiny).any()
    assert all(tensor.float().isfinite().all() for name, tensor in GOLDEN.items() if not name.endswith("codes"))
