"""Whether values differ by more than rounding. Filters and advantages ask here, so that they agree.

Equal rewards are often computed in two ways: 0.1 + 0.2 is 0.30000000000000004 and not 0.3. Divided by the deviation of
its group, that last bit becomes an advantage of 1.73. Such a spread is none:

    high - low <= roundings * eps * size          size: the largest magnitude; eps: from 1.0 to the next number

An addition is off by half an eps of its result at most. A sum of n parts of one sign is so off by (n - 1) / 2 eps of
its size, and two orders of the same parts differ by (n - 1) eps. 16 roundings cover sums of 17 parts, and their means.
The mean of a group (one rounding of the sum, one of the division) adds one eps at most.

The bound is relative, so a reward that is the small difference of large numbers can still carry more noise than that;
and it is far below any spread that is meant: a billionth of the rewards' size remains one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

REWARD_ROUNDINGS = 16  # of float64 rewards
TENSOR_ROUNDINGS = 4  # of float32 values of tokens: a product, a sum and the rounding to float32 are 3 halves each


def has_spread(low: float, high: float, eps: float = sys.float_info.epsilon, roundings: int = REWARD_ROUNDINGS) -> bool:
    """Of values between `low` and `high`. What is not finite is never taken for rounding."""
    if low == high:
        return False
    size = max(abs(low), abs(high))
    return not (math.isfinite(size) and high - low <= roundings * eps * size)


def tensor_differs(values: Tensor) -> bool:
    """The same of float32 values, all of them together."""
    if values.numel() < 2:
        return False
    low, high = torch.stack([values.min(), values.max()]).tolist()
    return has_spread(low, high, torch.finfo(torch.float32).eps, TENSOR_ROUNDINGS)


def differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group, or of none, have a spread."""
    return len(rewards) > 1 and has_spread(min(rewards), max(rewards))


def differences_from_mean(rewards: Sequence[float]) -> list[float]:
    """reward - mean of all; zeros, exactly, where the rewards do not differ."""
    if not differ(rewards):
        return [0.0] * len(rewards)
    scaled, exponent = near_one(rewards)
    mean = math.ldexp(math.fsum(scaled) / len(rewards), exponent)
    differences = [reward - mean for reward in rewards]
    assert all(map(math.isfinite, differences)), (
        f"rewards of up to {max(map(abs, rewards)):g} differ by no finite number"
    )
    return differences


def near_one(values: Sequence[float]) -> tuple[list[float], int]:
    """The values over 2^e, exactly, with the largest magnitude in [1/2, 1), and e: sums and squares stay finite."""
    exponent = math.frexp(max(map(abs, values)))[1]
    return [math.ldexp(value, -exponent) for value in values], exponent
