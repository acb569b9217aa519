"""The value head's loss of one token: squared error to the return, clipped as in PPO's code (arXiv 1707.06347).

    loss = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

V_old is the value before the first update on the batch, c `value_clip`. The larger of the two has no gradient once V
has moved by c towards R, and pulls back a V that moved away from it: several updates on one batch of returns move V by
c at most. With one update V is V_old, and the clip does nothing. None: the squared error alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import TokenLoss


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, value_clip: float | None) -> TokenLoss:
    """Per-token loss [N], its gradient through `values_N` alone, and its metrics."""
    error_N = (values_N - returns_N).square()
    clipped_N = torch.zeros_like(error_N)
    if value_clip is not None:
        near_N = values_N.clamp(old_values_N - value_clip, old_values_N + value_clip)
        near_error_N = (near_N - returns_N).square()
        clipped_N = (near_error_N > error_N).float()
        error_N = error_N.maximum(near_error_N)
    metrics = {
        "value/mean": values_N.detach(),
        "value/return_mean": returns_N,
        "value/clip_fraction": clipped_N.detach(),
    }
    return TokenLoss(0.5 * error_N, metrics)
