"""Rounds float32 to BF16 stochastically: up with a probability equal to the fraction cut off. The mean is exact.

BF16 numbers near 1 are 1/128 apart. Rounding to nearest loses an update of 1e-6 every time; stochastic rounding applies
it in one of some thousand steps. BF16 is the upper half of a float32. The method adds 16 random bits to the lower half
and cuts it off (Gupta et al., arXiv 1502.02551). Values that BF16 represents exactly, infinities and NaN do not change.
Narrow moments of the optimizer are rounded in the same way (kernels/optimizer/adamw.py).

The random bits depend only on (seed, step, name) and the number of the element in its tensor. Nothing has to be saved,
and a resumed run rounds like an uninterrupted one. CPU and GPU use the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from octetrl.kernels.optimizer.adamw import chance_noise, round_by_chance


def chance_key(*, seed: int, step: int, name: str) -> int:
    """A number of 31 bits for one update of one tensor. `name` identifies the tensor."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def round_stochastically(value: Tensor, *, key: int, first: int = 0) -> Tensor:
    """BF16 tensor of the shape of `value`, float32 on a CPU. On a GPU the kernel of the update rounds.

    `key`: of `chance_key`. `first`: number of the first element in the whole tensor, if `value` is a part of it.
    """
    assert value.dtype == torch.float32, f"stochastic rounding takes float32, got {value.dtype}"
    noise, _, _ = chance_noise(key, first, value.numel())
    return round_by_chance(value.contiguous(), noise.view(value.shape))
