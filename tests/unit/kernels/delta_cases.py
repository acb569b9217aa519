"""Inputs of gated DeltaNet's tests, and its recurrence in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

from octetrl.kernels.delta_rule.state import DeltaState, empty_state
from octetrl.shapes.delta_rule import DeltaShape

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_size=16, value_size=16)


def bounds_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def delta_inputs(
    num_tokens: int, shape: DeltaShape = SHAPE, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta. Keys share a direction, as behind SiLU; exp(g) lies mostly between 0.5 and 0.99."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(num_tokens, *sizes, generator=generator)

    shared = torch.randn(shape.key_size, generator=generator) / 2
    q, k = (silu(normal(shape.key_heads, shape.key_size) + shared) for _ in range(2))
    v = silu(normal(shape.value_heads, shape.value_size))
    g = -0.2 * softplus(normal(shape.value_heads))
    beta = normal(shape.value_heads).sigmoid()
    q = normalize(q, dim=-1) * shape.key_size**-0.5
    return q.to(dtype), normalize(k, dim=-1).to(dtype), v.to(dtype), g, beta


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor) -> Tensor:
    """The rule row by row, in float64, differentiable."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.double().repeat_interleave(group, 1) for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    starts, rows = set(bounds.tolist()), []
    for t in range(int(bounds[-1])):
        if t in starts:
            s_HVK = torch.zeros(*v.shape[1:], k.shape[2], dtype=torch.float64, device=v.device)
        s_HVK = g[t].exp()[:, None, None] * s_HVK
        d_HV = beta[t, :, None] * (v[t] - (s_HVK @ k[t, ..., None])[..., 0])
        s_HVK = s_HVK + d_HV[..., None] * k[t, :, None]
        rows.append((s_HVK @ q[t, ..., None])[..., 0])
    return torch.stack(rows)


def poisoned_state(
    slots: int, dtype: torch.dtype, shape: DeltaShape = SHAPE, conv_rows: int = SHAPE.conv_rows(1)
) -> DeltaState:
    """Slots full of NaN, as memory may be."""
    state = empty_state(shape, slots, conv_rows, dtype)
    for kept in state:
        kept.view(torch.uint8).fill_(0xFF)
    return state
