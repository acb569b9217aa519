"""The tensors of a worker's checkpoint: weights, optimizer, reference, critic and KV scales, by file.

    one worker        the model as a Hugging Face folder (an adapter as PEFT's), and optimizer.safetensors
    several workers   the owners each their rows of weights and optimizer (trainer/sharded_state.py), once if several
                      groups own them (trainer/peers.py); worker 0 the model's
                      config.json as well, or the whole adapter, which every worker has

One worker saves like several where the model's tensors in a Hugging Face folder would be copies of its own.

A critic has files of its own, in the same two ways. Any number of workers loads what any number saved, with the same
weights and moments to the bit. What is equal on all workers (reference, KV scales) is saved by worker 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octetrl.fp8.kv_scales import KVScales
from octetrl.layers.tensor_group import ONE_WORKER, TensorGroup, join_columns, own_columns
from octetrl.models.decoder import Decoder
from octetrl.models.hf_weights import hf_config_files
from octetrl.models.peft_adapters import load_trained, trained_files
from octetrl.models.row_shards import RowShards
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.models.weight_files import files_are_copies
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.checkpoint import OPTIMIZER, Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.prepared import TrainerState
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.scalar_trainer import ScalarState, ScalarTrainer
from octetrl.trainer.sharded_state import (
    OwnedState,
    load_shared,
    own_optimizer,
    own_weights,
    read_optimizer,
    read_untrained,
    read_weights,
    shard_files,
)
from octetrl.trainer.shards import Share
from octetrl.trainer.state_writer import Content, Files, StateWriter, in_shards
from octetrl.trainer.trainer import Trainer

CRITIC, CRITIC_OPTIMIZER, CRITIC_STEM = "critic.safetensors", "critic_optimizer.safetensors", "critic"
REFERENCE, KV_SCALES = "reference.safetensors", "kv_scales.safetensors"
EARLIER_SCALES = "earlier_kv_scales.safetensors"  # by policy version: that of a tensor's name, before the first dot


class SavedWorker:
    """What every worker has that trains and is saved. `state_files`: its files, by name."""

    def __init__(
        self, trainer: Trainer | RewardTrainer, state_files: Callable[[], Files], device: torch.device
    ) -> None:
        self._trainer, self._state = trainer, StateWriter(state_files, device)

    @property
    def policy_version(self) -> int:
        return self._trainer.policy_version

    @property
    def weights_are_whole(self) -> bool:
        """False while an update changes the weights: such weights must not be saved."""
        return self._trainer.weights_are_whole

    def prepare_saving(self) -> None:
        """Allocates the host memory that `copy_state` needs; on a CPU beside what follows."""
        self._state.prepare()

    def copy_state(self) -> str | None:
        """Copies the state into host memory, for `write_state`. Returns None, or why the host has no room for it."""
        return self._state.copy()

    def write_state(self, folder: Path, copied: bool) -> list[WrittenFile]:
        """Writes the copied state, or the live one: the model in Hugging Face form (with LoRA: the adapter in PEFT's,
        with the head of a reward model), and all that `load` needs."""
        return self._state.write(folder, copied=copied)


def state_files(
    trainer: Trainer,
    model: Decoder,
    base: str | None,
    kv_scales: KVScales | None,
    earlier_scales: Mapping[int, KVScales],
) -> dict[str, Content]:
    """The files of this worker, by name. `model` is the trainer's, `base` the folder that it was loaded from."""
    share, group = trainer.peers.worker, trainer.peers.group
    files = _model_files(model, _owned_by(trainer), base)
    if trainer.critic is not None:
        files |= _critic_files(_owned_by(trainer.critic.scalar_trainer))
    scales = None
    if kv_scales is not None:  # by head, of which each tensor-parallel worker has some
        parts = kv_scales.to_tensors(model.spec)
        scales = {name: join_columns(group, part) if part.dim() == 2 else part for name, part in parts.items()}
    if share.rank > 0:
        return files
    reference = trainer.reference.state()
    if reference:
        files |= in_shards(REFERENCE, reference)
    if scales is not None:
        files[KV_SCALES] = scales
    if earlier_scales:  # of whole models alone: with roles no workers share one
        files[EARLIER_SCALES] = {
            f"{version}.{name}": tensor
            for version, one in earlier_scales.items()
            for name, tensor in one.to_tensors(model.spec).items()
        }
    return files


def load_state(trainer: Trainer, saved: Checkpoint, policy_version: int) -> None:
    """Loads weights, optimizer, reference and critic from a verified checkpoint."""
    weights, optimizer = _load_model(trainer, saved)
    trainer.load_state(TrainerState(weights, optimizer, policy_version))
    if REFERENCE in saved.files:
        trainer.reference.load_state(saved.tensors(REFERENCE))
    if trainer.critic is not None:
        trainer.critic.load_state(_saved_critic(saved, _owned_by(trainer.critic.scalar_trainer)))


def saved_scales(
    saved: Checkpoint, spec: ModelSpec, device: torch.device, group: TensorGroup = ONE_WORKER
) -> KVScales | None:
    """The KV scales of a checkpoint, of the heads that this worker has; None if it has none."""
    if KV_SCALES not in saved.files:
        return None
    tensors = saved.tensors(KV_SCALES)
    own = {name: own_columns(group, whole) if whole.dim() == 2 else whole for name, whole in tensors.items()}
    return KVScales.from_tensors(own, spec, device)


def saved_earlier_scales(saved: Checkpoint, spec: ModelSpec, device: torch.device) -> dict[int, KVScales]:
    """The KV scales of a checkpoint by the policy version that generated with them; none if it has no such file."""
    if EARLIER_SCALES not in saved.files:
        return {}
    by_version: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors(EARLIER_SCALES).items():
        version, _, own = name.partition(".")
        by_version.setdefault(int(version), {})[own] = tensor
    return {version: KVScales.from_tensors(tensors, spec, device) for version, tensors in by_version.items()}


def reward_model_files(trainer: ScalarTrainer, base: str | None) -> dict[str, Content]:
    """The files of this worker of a run that trains a reward model."""
    return _model_files(trainer.model, _owned_by(trainer), base)


def load_reward_model(trainer: ScalarTrainer, saved: Checkpoint) -> ScalarState:
    """The saved state of the rows that this worker owns. Whole weights are loaded in place."""
    return ScalarState(*_load_model(trainer, saved))


def _owned_by(trainer: Trainer | ScalarTrainer) -> OwnedState:
    """What this worker owns, and what has no gradient: correction biases of routers."""
    model, lora = trainer.model, trainer.model.lora
    untrained = {} if lora else {name: one.detach() for name, one in model.named_parameters() if not model.trains(name)}
    optimizer, weights, peers = trainer.optimizer, trainer.state().weights, trainer.peers
    owners, parts = peers.owners, peers.group
    own = OwnedState(
        weights,
        optimizer.state_tensors(),
        optimizer.slots,
        Share(owners.rank * parts.size + parts.rank, owners.count * parts.size),
        writes=peers.share.rank < owners.count,
        untrained=untrained,
    )
    if isinstance(trainer, ScalarTrainer):
        return own
    return replace(own, cut=cut_rows_of(model.spec, lora), writes_uncut=parts.rank == 0)


def _model_files(model: Decoder, own: OwnedState, base: str | None) -> dict[str, Content]:
    if own.share.count == 1 and (model.lora is not None or not files_are_copies(model.spec)):
        return {**trained_files(model, base), **in_shards(OPTIMIZER, own.optimizer)}
    files = shard_files(own, with_weights=model.lora is None)
    of_model = hf_config_files(model) if model.lora is None else trained_files(model, base)
    return {**files, **of_model} if own.writes and own.share.rank == 0 else files


def _load_model(
    trainer: Trainer | ScalarTrainer, saved: Checkpoint
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The saved weights and optimizer state of the rows that this worker owns. Whole weights are loaded in place."""
    model = trainer.model
    shards = RowShards.find(saved.folder)
    if model.lora is not None:
        load_trained(model, saved.folder)
    elif shards is None:
        load_shared(model, trainer.peers, lambda one, rows: load_trained(one, saved.folder, rows))
    own = _owned_by(trainer)
    if shards is None:
        return own.weights, own_optimizer(saved.tensors(OPTIMIZER), own)
    weights = own.weights if model.lora is not None else read_weights(shards, own)
    read_untrained(shards, own)
    optimizer = read_optimizer(shards, own)
    shards.close()
    return weights, optimizer


def _critic_files(own: OwnedState) -> dict[str, Content]:
    if own.share.count > 1:
        return shard_files(own, CRITIC_STEM)
    return {**in_shards(CRITIC, own.weights), **in_shards(CRITIC_OPTIMIZER, own.optimizer)}


def _saved_critic(saved: Checkpoint, own: OwnedState) -> ScalarState:
    """The saved state of the rows that this worker owns of the critic."""
    shards = RowShards.find(saved.folder, CRITIC_STEM)
    if shards is None:
        weights = saved.tensors(CRITIC)
        weights = weights if own.share.count == 1 else own_weights(weights, own)
        return ScalarState(weights, own_optimizer(saved.tensors(CRITIC_OPTIMIZER), own))
    state = ScalarState(read_weights(shards, own), read_optimizer(shards, own))
    shards.close()
    return state
