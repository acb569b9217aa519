"""Names that other libraries and readers give to a recipe's settings, for the hint after an unknown key."""

from __future__ import annotations

OURS = {
    "beta": "algorithm.kl_coefficient",
    "epochs": "steps",
    "eval_steps": "evaluation.every",
    "learning_rate": "trainer.optimizer.lr",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "steps",
    "n": "rollout.group_size",
    "num_epochs": "steps",
    "num_generations": "rollout.group_size",
    "num_iterations": "trainer.epochs",
    "num_train_epochs": "steps",
    "ppo_epochs": "trainer.epochs",
    "report_to": "logging.wandb_project",
    "save_steps": "checkpoint.every",
    "total_epochs": "steps",
}
