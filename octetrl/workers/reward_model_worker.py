"""What one GPU (or one CPU process) holds while a reward model is trained: the model and its trainer, no engine.

The verbs are those of `Worker` (workers/worker.py), so the step, the loop and the checkpoints treat both alike. Those
of a rollout are never called: a recipe for a reward model has no tasks.
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.engine.weights import digest_of, weight_set
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import PackedBatch, PolicyUpdate, Published
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.state_writer import Content
from octetrl.trainer.without_update import Sums, held_out_sums
from octetrl.workers.checkpoint_state import SavedWorker, load_reward_model, reward_model_files
from octetrl.workers.clock import Clock
from octetrl.workers.kernel_paths import path_metrics


class RewardModelWorker(SavedWorker):
    """Built once. `model` comes loaded and quantised."""

    def __init__(
        self,
        recipe: Recipe,
        model: ScalarDecoder,
        algorithm: Algorithm,
        *,
        peers: Peers = ALONE,
    ) -> None:
        assert algorithm.reward_loss is not None, "built for an algorithm that trains rewards"
        self.recipe = recipe
        self.model, self.device = model, model.lm_head_weight.device
        self.clock = Clock(self.device)
        self.trainer = RewardTrainer(
            self.model,
            recipe.trainer,
            algorithm.reward_loss,
            total_steps=recipe.steps,
            seed=recipe.seed,
            peers=peers,
        )
        super().__init__(self.trainer, self._state_files, self.device)

    @property
    def layout(self) -> PackingLayout:
        return self.trainer.layout

    # ------------------------------------------------------------ the verbs of a step

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        with self.clock("train") as took:
            update = self.trainer.train(batch)
        return replace(update, metrics={**update.metrics, **took})

    def measure_held_out(self, batch: PackedBatch) -> list[Sums]:
        return held_out_sums(self.trainer, batch, KVReplay())

    def publish(self, policy_version: int) -> Published:
        """Nothing generates with these weights. The digest tells whether several workers hold the same ones."""
        paths = path_metrics(trained=self.model, generating=None)
        if self.trainer.peers.share.count == 1:
            return Published(policy_version, weights_digest="", metrics=paths)
        held = weight_set(self.model, policy_version)
        codes = [tensor for quantized in held.codes.values() for tensor in quantized]
        return Published(policy_version, digest_of(policy_version, [*codes, *held.tensors.values()]), metrics=paths)

    # ------------------------------------------------------------ saving and loading

    def _state_files(self) -> dict[str, Content]:
        return reward_model_files(self.trainer.scalar_trainer, self.recipe.model.path)

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self.trainer.load_state(load_reward_model(self.trainer.scalar_trainer, saved), policy_version)
