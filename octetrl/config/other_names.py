"""Names that other libraries give to a recipe's settings, for the hint after an unknown key."""

from __future__ import annotations

OURS = {
    "beta": "algorithm.kl_coefficient",
    "learning_rate": "trainer.optimizer.lr",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
}
