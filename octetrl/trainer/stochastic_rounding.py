"""float32 to BF16 by chance: up with the probability of the fraction that is cut off, so that the mean is exact.

A BF16 weight near 1 has steps of 1/128; an update of 1e-6 rounded to nearest is lost every time, here it lands once in
some thousand steps. A BF16 number is the upper half of a float32, so: add 16 random bits to the lower half, cut it off
(Gupta et al., arXiv 1502.02551). A value that BF16 holds exactly stays as it is; infinities and NaN stay what they are.
The moments of an optimizer that keeps them narrow are rounded likewise (kernels/optimizer/adamw.py).

The bits are a function of (seed, step, name) and the element's number alone. Nothing has to be saved, and a resumed run
rounds as the one that was never stopped. CPU and GPU draw the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from octetrl.kernels.optimizer.adamw import chance_noise, round_by_chance


def chance_key(*, seed: int, step: int, name: str) -> int:
    """31 bits that stand for one update of one tensor; `name` tells tensors of one step apart."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def round_stochastically(value: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """BF16 tensor of the same shape, on a CPU: on a GPU the update's own kernel rounds. value: float32."""
    assert value.dtype == torch.float32, f"stochastic rounding takes float32, got {value.dtype}"
    noise, _, _ = chance_noise(chance_key(seed=seed, step=step, name=name), 0, value.numel())
    return round_by_chance(value.contiguous(), noise.view(value.shape))
