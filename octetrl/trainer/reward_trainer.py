"""Trains a reward model on preference pairs, in a run that has no policy.

    reward of a sequence = the scalar at its last token
    loss = sum over pairs of algorithm.reward_loss(r_chosen, r_rejected) / pairs of the optimizer step

`pack` keeps both answers of a pair in one micro-batch. There is no rollout, no KV cache and no log-prob.

T tokens of a micro-batch, P pairs, S = 2 P sequences.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from octetrl.algorithms.bradley_terry import RewardLoss
from octetrl.algorithms.token_loss import TokenLoss
from octetrl.config.schema import TrainerConfig
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import MicroBatch, PackedBatch, PolicyUpdate
from octetrl.trainer.optimizer import learning_rate, place_of
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import MetricMeans, on_device
from octetrl.trainer.scalar_trainer import ScalarPart, ScalarState, ScalarTrainer


class RewardTrainer:
    """Owns the optimizer. `policy_version` counts the `train` calls that changed the weights."""

    def __init__(
        self,
        model: ScalarDecoder,
        config: TrainerConfig,
        loss: RewardLoss,
        *,
        total_steps: int,
        seed: int = 0,
        peers: Peers = ALONE,
    ) -> None:
        self.model, self.config, self.total_steps = model, config, total_steps
        self.policy_version = 0
        self._loss = loss
        self.peers = peers
        self.scalar_trainer = ScalarTrainer(model, config, config.optimizer, seed=seed, peers=peers)

    @property
    def layout(self) -> PackingLayout:
        """How `pack` should pack for this trainer."""
        return PackingLayout(
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
            minibatches=self.config.minibatches,
            padded_attention=self.scalar_trainer.device.type == "cpu",
        )

    @property
    def weights_are_whole(self) -> bool:
        """False from the first optimizer step of a `train` call to its end."""
        return self.scalar_trainer.weights_are_whole

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        """Train on `batch`. An empty batch changes nothing. NonFiniteError: the minibatch was not applied."""
        if not batch.minibatches:
            return PolicyUpdate(self.policy_version, {"train/skipped": 1.0})
        started = time.perf_counter()
        lr = learning_rate(place_of(batch, self.policy_version), self.config.optimizer, self.total_steps)
        minibatches = [[self._part(micro_batch) for micro_batch in minibatch] for minibatch in batch.minibatches]
        means, updates = MetricMeans(), list[dict[str, float]]()
        for _ in range(self.config.epochs):
            for parts in minibatches:
                own_pairs = torch.tensor([sum(part.weights_I.numel() for part in parts)])
                pairs = float(self.peers.sum(own_pairs, "pairs")[0])
                updates.append(self.scalar_trainer.update(parts, pairs, lr, means))
        self.policy_version += 1
        self.scalar_trainer.weights_are_whole = True
        parts = [part for minibatch in minibatches for part in minibatch]
        own = [(part.micro_batch.token_ids_T.numel(), part.weights_I.numel()) for part in parts]
        own_sums = torch.tensor([sum(column) for column in zip((0, 0), *own, strict=True)])
        tokens, pairs = self.peers.sum(own_sums, "token counts").tolist()
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        metrics |= means.read(self.peers)
        metrics["lr"] = lr
        metrics["train/updates"] = float(len(updates))
        metrics["train/pairs"] = pairs
        metrics["train/tokens_per_second"] = self.config.epochs * tokens / (time.perf_counter() - started)
        return PolicyUpdate(self.policy_version, metrics)

    def measure(self, micro_batch: MicroBatch) -> TokenLoss:
        """Loss and metrics of each pair with the present weights."""
        part = self._part(micro_batch)
        return part.loss(self.scalar_trainer.scalars(part.micro_batch, part.rows_R))

    def state(self) -> ScalarState:
        return self.scalar_trainer.state()

    def load_state(self, state: ScalarState, policy_version: int) -> None:
        self.scalar_trainer.load_state(state)
        self.policy_version = policy_version

    def _part(self, micro_batch: MicroBatch) -> ScalarPart:
        micro_batch = on_device(micro_batch, self.scalar_trainer.device)
        rows_S = pair_ends(micro_batch)
        pairs = rows_S.numel() // 2

        def loss(rewards_S: Tensor) -> TokenLoss:
            return self._loss(rewards_S[:pairs], rewards_S[pairs:])

        return ScalarPart(micro_batch, rows_S, loss, torch.ones(pairs, device=rows_S.device))


def pair_ends(micro_batch: MicroBatch) -> Tensor:
    """Indices of last tokens, int64 [S]: of the chosen sequences, then of the rejected ones in the same order."""
    assert micro_batch.chosen_N is not None, "a reward model is trained on preference pairs"
    ends_S = micro_batch.cu_seqlens_B1[1:].long() - 1
    chosen_S = torch.zeros(ends_S.numel(), dtype=torch.bool, device=ends_S.device)
    chosen_S[micro_batch.sequence_N] = micro_batch.chosen_N
    assert bool((chosen_S[0::2] != chosen_S[1::2]).all()), "chosen and rejected of a pair must be neighbours"
    return torch.cat([ends_S[chosen_S], ends_S[~chosen_S]])
