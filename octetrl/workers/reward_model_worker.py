"""What one GPU (or one CPU process) holds while a reward model is trained: the model and its trainer, no engine.

The verbs are those of `Worker` (workers/worker.py), so the step, the loop and the checkpoints treat both alike. Those
of a rollout are never called: a recipe for a reward model has no tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.engine.session import OnProgress, Session
from octetrl.models.peft_adapters import load_trained, save_trained
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import Completion, GenerationRequest, PackedBatch, PolicyUpdate, Published
from octetrl.telemetry.spans import Spans
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.scalar_trainer import ScalarState
from octetrl.workers.kernel_paths import path_metrics

NO_ROLLOUT = "a reward model's run draws no rollouts"


class RewardModelWorker:
    """Built once. `model` comes loaded and quantised."""

    needs_calibration = False

    def __init__(
        self,
        recipe: Recipe,
        model: ScalarDecoder,
        algorithm: Algorithm,
        spans: Spans,
    ) -> None:
        assert algorithm.reward_loss is not None, "built for an algorithm that trains rewards"
        self.recipe = recipe
        self.model, self.spans, self.device = model, spans, model.lm_head_weight.device
        self.trainer = RewardTrainer(
            self.model, recipe.trainer, algorithm.reward_loss, total_steps=recipe.steps, seed=recipe.seed
        )

    @property
    def layout(self) -> PackingLayout:
        return self.trainer.layout

    # ------------------------------------------------------------ the verbs of a step

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        with self.spans("train"):
            return self.trainer.train(batch)

    def publish(self, policy_version: int) -> Published:
        """There is nobody to publish to."""
        return Published(policy_version, weights_digest="", metrics={})

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None = None
    ) -> list[list[Completion]]:
        raise AssertionError(NO_ROLLOUT)

    def session(self, on_progress: OnProgress | None = None) -> AbstractContextManager[Session]:
        raise AssertionError(NO_ROLLOUT)

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> None:
        raise AssertionError(NO_ROLLOUT)

    def forget_prefixes(self) -> None:
        raise AssertionError(NO_ROLLOUT)

    def rollout_metrics(self) -> dict[str, float]:
        return {}

    def path_metrics(self) -> dict[str, float]:
        return path_metrics(trained=self.model, generating=None)

    def memory_metrics(self) -> dict[str, float]:
        """The device's peak since the last call; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {"memory/peak_gb": peak / 1e9}

    # ------------------------------------------------------------ saving and loading

    def write_model(self, folder: Path) -> None:
        """The reward model in Hugging Face form; with LoRA its adapter and head in PEFT's."""
        save_trained(self.model, folder, base=self.recipe.model.path)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"optimizer.safetensors": dict(self.trainer.state().optimizer)}

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        load_trained(self.model, saved.folder)
        weights = self.trainer.state().weights
        self.trainer.load_state(ScalarState(weights, saved.tensors("optimizer.safetensors")), policy_version)
