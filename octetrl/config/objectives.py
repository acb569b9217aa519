"""Where an objective's own defaults differ from GRPO's, which are those of `AlgorithmConfig`.

They are the papers' (docs/algorithms.md). A field that the recipe gives wins.
"""

from __future__ import annotations

from typing import Any, Literal

LearnsFrom = Literal["rollouts", "conversations", "preferences"]

_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "token_weighting": "sequence", "corrections": ("sequence_tis",)}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28, "max_refills": 10, "overlong_buffer": 0.2},
    "gspo": _GSPO,
    "gspo_token": _GSPO,
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"token_weighting": "constant"},
    "reinforce_pp": {"drop_zero_variance": False, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"kl_estimator": "k2"},
    "ppo": {"drop_zero_variance": False, "kl_in": "reward", "kl_estimator": "k1"},
    "sapo": {"token_weighting": "sequence"},
}
NEED_SIBLINGS = ("grpo", "dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo", "reinforce_pp_baseline")
LEARNS_FROM: dict[str, LearnsFrom] = {  # all others learn from rollouts
    "sft": "conversations",
    "dpo": "preferences",
    "ipo": "preferences",
    "reward_model": "preferences",
}
