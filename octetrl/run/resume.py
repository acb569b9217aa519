"""What a run's checkpoint holds: the state that a resumed run needs to equal an uninterrupted one.

    model-*.safetensors, config.json, tokenizer ...   the weights as a Hugging Face folder, as eval and export read it;
                                                      with LoRA adapter_config.json, adapter_model.safetensors instead
    optimizer.safetensors                             float32 masters and moments, or moments alone
    critic.safetensors, critic_optimizer.safetensors  PPO: the value model and its optimizer
    state-00001-of-00004.safetensors, .json ...       several workers, in place of weights and optimizer: the rows of
                                                      each worker; critic-00001-of-00004... likewise
    reference.safetensors                             a reference that is updated, and an adaptive KL's coefficient
    kv_scales.safetensors                             the scales for the next rollout's cache
    earlier_kv_scales.safetensors                     those of the versions before, where batches are generated ahead
    batches_ahead.json                                these batches, with `checkpoint.batches_ahead: saved`
    cursor.json                                       step, policy version, data order, answers' lengths, state of every
                                                      random generator

Everything else (request seeds, stochastic rounding, held-out tasks) follows from these and the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octetrl.models.row_shards import STEM
from octetrl.run.batches_ahead import BATCHES, DataPlace, batches_from_json
from octetrl.run.state import Run
from octetrl.run.trained_model import weights_folder
from octetrl.trainer import checkpoint

CURSOR = "cursor.json"
OF_THE_RUN = (  # not the model's: what their names begin with
    checkpoint.OPTIMIZER,
    f"{STEM}-",  # of several workers: weights, too
    "reference.safetensors",
    "critic",
    "kv_scales.safetensors",
    "earlier_kv_scales.safetensors",
    BATCHES,
    CURSOR,
    checkpoint.MANIFEST,
)
NOT_OF_A_BRANCH = ("kv_scales.safetensors", "earlier_kv_scales.safetensors", "reference.safetensors")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state of a run after a whole step, without its tensors."""

    step: int
    policy_version: int
    taskset: Mapping[str, Any]
    conversations: Mapping[str, Any] | None
    lengths: Mapping[str, Any]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, run: Run, step: int) -> Cursor:
        place = run.method.place(run)
        return cls(
            step=step,
            policy_version=run.workers.policy_version,
            taskset=place.taskset,
            conversations=None if run.conversations is None else run.conversations.state(),
            lengths=place.lengths,
            random=place.random,
        )

    def put_into(self, run: Run, *, has_changed: bool) -> None:
        if run.conversations is not None and self.conversations is not None:
            run.conversations.restore(self.conversations, has_changed=has_changed)
        DataPlace(self.taskset, self.lengths, self.random).put_into(run.taskset, run.lengths, has_changed=has_changed)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def restore(run: Run, path: Path, *, has_changed: bool = False) -> None:
    """Verifies and loads the checkpoint in `path`. Raises UserError for a damaged one.

    has_changed: whether the user allowed other contents than the run had then (contents.py)."""
    saved = checkpoint.load(path)
    cursor = Cursor(**saved.json(CURSOR))
    run.workers.load(saved, cursor.policy_version)
    cursor.put_into(run, has_changed=has_changed)
    if BATCHES in saved.files:
        run.method.put_back(run, batches_from_json(saved.json(BATCHES)), cursor.step)


def branch(run: Run, source: str) -> str:
    """Loads weights, optimizer and critic of another run, for the first step of this one. Returns a note.

    Schedule, order of data and counts start from the beginning. A calibrated cache is calibrated again, and a reference
    has these weights."""
    saved = checkpoint.load(weights_folder(Path(source)))
    taken = tuple(name for name in saved.files if name not in NOT_OF_A_BRANCH)
    run.workers.load(replace(saved, files=taken), 0)
    return f"begins with weights and optimizer of {saved.folder}"
