"""Random weights of a new model: normal matrices, norms that multiply by one, biases of zero.

Embedding and lm_head have a standard deviation of 0.02, linears 1 / sqrt(in_features). Each tensor is drawn on the CPU
from (seed, its name), so its values depend neither on the device nor on other tensors.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from octetrl.layers.weight_memory import Loading, filling
from octetrl.models.tensor_rows import cut_rows_of, pieces_of
from octetrl.shapes.blocks import VectorLayout
from octetrl.shapes.spec import ModelSpec

EMBEDDING_STD = 0.02


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, spec: ModelSpec, loading: Loading | None = None) -> None:
    """Fills all parameters but adapters in place, or the rows of `loading`. `seed`: any integer. A part of a model gets
    its rows of the whole."""
    cut, fill = cut_rows_of(spec), filling(model, loading)
    starts = {
        f"{block}.{tensor.name}": tensor.starts_at
        for block, layout in spec.named_blocks()
        for tensor in layout.tensors(spec)
        if isinstance(tensor, VectorLayout) and tensor.starts_at is not None
    }
    ordinary = 0.0 if spec.offset_norms else 1.0
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            continue
        if parameter.dim() == 1:
            parameter.fill_(starts.get(name, 0.0 if name.endswith("bias") else ordinary))
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
        rows = cut.get(name)
        whole = parameter.shape if rows is None else (rows.whole_rows, *parameter.shape[1:])
        drawn = torch.empty(whole).normal_(std=std, generator=generator)
        with fill(name) as (first, filled):
            for piece in pieces_of(rows, first, first + len(filled)):
                start = piece.start - first
                filled[start : start + piece.rows] = drawn[piece.whole : piece.whole + piece.rows]
