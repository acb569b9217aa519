"""The norms of transformers' modules on a GPU, as sums of one order.

torch's mean over a row may add in another order when a forward has fewer rows. So on a GPU the normalised row comes
from our kernel (kernels/rows/rms_norm.py), and the weight is multiplied as the module does it:

    weight_after     weight * round(x / rms(x))             Llama and most others
    weight_before    round(weight * x / rms(x))             OLMo 2 and 3
    offset           round((1 + weight) * x / rms(x))       Gemma
    centred          round(weight * (x - mean) / deviation) Cohere; torch's layer norm, whose rows are a block each

Which of them a module is, its answer to random rows says. A module that is none of them stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octetrl.kernels.rows.rms_norm import rms_norm

Multiply = Callable[[Tensor, Tensor, torch.dtype], Tensor]  # (float32 rows, the module's weight, dtype of the result)
KINDS: dict[str, Multiply] = {
    "weight_after": lambda xhat, weight, dtype: weight * xhat.to(dtype),
    "weight_before": lambda xhat, weight, dtype: (weight * xhat).to(dtype),
    "offset": lambda xhat, weight, dtype: ((1.0 + weight.float()) * xhat).to(dtype),
    "centred": lambda xhat, weight, dtype: (weight.float() * xhat).to(dtype),
}
ROWS, AGREE = 16, 0.99  # share of elements with equal bits; two kinds agree in about three of four


def fix_order(module: nn.Module) -> None:
    """Let a norm of transformers run in one order of sums on a GPU. Does nothing to another module."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(eps, float) and [name for name, _ in module.named_parameters()] == ["weight"]:
        kind = kind_of(module, eps)
        if kind is not None:
            module.__dict__["forward"] = partial(_forward, module, type(module).forward, kind, eps)


def kind_of(module: nn.Module, eps: float) -> str | None:
    """The key of `KINDS` whose answer is the module's, by random rows in BF16 on a CPU."""
    own = copy.deepcopy(module).to_empty(device="cpu").to(torch.bfloat16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    weight: Tensor = own.get_parameter("weight").normal_(generator=generator)
    x = torch.randn((ROWS, *weight.shape), generator=generator).to(torch.bfloat16)
    wanted = own(x)
    for kind in KINDS:
        if (_normed(x, weight, kind, eps) == wanted).float().mean() > AGREE:
            return kind
    return None


def _forward(module: nn.Module, eager: Callable[..., Tensor], kind: str, eps: float, x: Tensor) -> Tensor:
    return _normed(x, module.get_parameter("weight"), kind, eps) if x.is_cuda else eager(module, x)


def _normed(x: Tensor, weight: Tensor, kind: str, eps: float) -> Tensor:
    """x: [..., C]. Returns its shape and dtype."""
    size = x.shape[-1]
    rows_RC = x.reshape(-1, size).float()
    if kind == "centred":
        xhat_RC = F.layer_norm(rows_RC, (size,), eps=eps)
    else:
        xhat_RC = rms_norm(rows_RC, torch.ones(size, device=x.device), eps)
    return KINDS[kind](xhat_RC.view(x.shape), weight, x.dtype)
