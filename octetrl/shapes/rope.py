"""The kinds of RoPE scaling. `layers/rotary.py` computes the angles, `models/rope_config.py` reads config.json.

Llama3Scaling   low frequencies are divided by the factor, high ones stay, those in between are blended
LinearScaling   all frequencies are divided by the factor
YarnScaling     like Llama 3's, blended linearly over planes, and cos and sin are multiplied by a factor
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: blended linearly in 1/wavelength.

    Planes with a wavelength above original context / low_freq_factor are divided by `factor`. Planes with a wavelength
    below original context / high_freq_factor stay.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071), as transformers' `_compute_yarn_parameters` reads it.

    Planes that turn more than `beta_fast` times in the original context stay. Planes that turn less than `beta_slow`
    times are divided by `factor`. Between them the share falls linearly with the plane's number. `truncate` rounds both
    ends of that range outwards to whole planes.

    `mscale`, `mscale_all_dim` and `explicit_factor` decide by how much cos and sin are multiplied (`rotary_factor`).
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    explicit_factor: float | None = None  # `attention_factor` in config.json
    truncate: bool = True

    @property
    def rotary_factor(self) -> float:
        """The multiplier of cos and sin, `attention_factor` in transformers. Scores grow by its square."""
        if self.explicit_factor is not None:
            return self.explicit_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    @property
    def softmax_factor(self) -> float:
        """The multiplier of the softmax scale in DeepSeek's MLA; other attention leaves it out."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention's scores with the context: 0.1 mscale ln(factor) + 1; 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
