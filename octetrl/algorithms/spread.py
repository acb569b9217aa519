"""Decide whether values differ by more than rounding. Filters and advantages share this rule, so that they agree.

Equal rewards are often computed in two ways: 0.1 + 0.2 is 0.30000000000000004 and not 0.3. Divided by the deviation of
its group, that last bit becomes an advantage of 1.73. Values count as equal if

    high - low <= roundings * eps * size          size: the largest magnitude; eps: from 1.0 to the next number

The error of an addition is at most half an eps of its result. The error of a sum of n terms of one sign is therefore
at most (n - 1) / 2 eps of its size, and two orders of the same terms differ by at most (n - 1) eps. 16 roundings cover
sums of 17 terms, and their means. The mean of a group (one rounding of the sum, one of the division) adds at most one
eps.

The bound is relative. A reward that is a small difference of large numbers may contain more noise than the bound. The
bound is far below any intended spread: a billionth of the rewards' size still counts as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.records import differ, has_spread

TENSOR_ROUNDINGS = 4  # of float32 values of tokens: a product, a sum and the rounding to float32 are 3 halves each


def tensor_differs(values: Tensor) -> bool:
    """Whether float32 values, of any shape, differ by more than rounding."""
    if values.numel() < 2:
        return False
    low, high = torch.stack([values.min(), values.max()]).tolist()
    return has_spread(low, high, torch.finfo(torch.float32).eps, TENSOR_ROUNDINGS)


def differences_from_mean(rewards: Sequence[float]) -> list[float]:
    """reward - mean of all rewards; exact zeros for a reward that does not differ from the mean."""
    if not differ(rewards):
        return [0.0] * len(rewards)
    scaled, exponent = near_one(rewards)
    mean = math.ldexp(math.fsum(scaled) / len(rewards), exponent)
    differences = [reward - mean if differ((reward, mean)) else 0.0 for reward in rewards]
    assert all(map(math.isfinite, differences)), (
        f"rewards of up to {max(map(abs, rewards)):g} differ by no finite number"
    )
    return differences


def near_one(values: Sequence[float]) -> tuple[list[float], int]:
    """The values divided by 2^e, without rounding, and e. The largest magnitude is then in [1/2, 1).

    Sums and squares of the result stay finite.
    """
    exponent = math.frexp(max(map(abs, values)))[1]
    return [math.ldexp(value, -exponent) for value in values], exponent
