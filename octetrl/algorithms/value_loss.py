"""The value head's loss of one token: squared error to the return, clipped as in PPO's code (arXiv 1707.06347).

    loss = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

V_old is the value before the first update on the batch, c is `value_clip`. Once V has moved by c towards R, the maximum
has no gradient; a V that moved away from R is pulled back. Several updates on one batch of returns therefore move V by
at most c. With one update V is V_old and the clip does nothing. `value_clip` None: the squared error only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import TokenLoss


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, value_clip: float | None) -> TokenLoss:
    """Per-token loss [N] and its metrics, from float32 [N] tensors. The gradient is that of `values_N`."""
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
