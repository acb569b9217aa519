"""Random weights of a new model: normal matrices, norms of one, biases of zero.

Embedding and lm_head have a standard deviation of 0.02, linears 1 / sqrt(in_features). Each tensor is drawn on the CPU
from (seed, its name), so its values depend neither on the device nor on other tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

EMBEDDING_STD = 0.02


@torch.no_grad()
def draw_weights(named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Fills the parameters in place. `seed`: any integer."""
    for name, parameter in named_parameters:
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
        parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
