"""Checkpoints of a run: the state that a resumed run needs to equal an uninterrupted one.

    model-*.safetensors, config.json, tokenizer ...   the weights as a Hugging Face folder, as eval and export read it;
                                                      with LoRA adapter_config.json, adapter_model.safetensors instead
    optimizer.safetensors                             float32 masters and moments, or moments alone
    critic.safetensors, critic_optimizer.safetensors  PPO: the value model and its optimizer
    reference.safetensors                             a reference that is updated, and an adaptive KL's coefficient
    kv_scales.safetensors                             the scales for the next rollout's cache
    cursor.json                                       step, policy version, data order, answers' lengths, state of every
                                                      random generator

Everything else (request seeds, stochastic rounding, held-out tasks) follows from these and the recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.config.errors import UserError
from octetrl.config.schema import CheckpointConfig
from octetrl.data.tokenizer import save_tokenizer_files
from octetrl.models.peft_adapters import is_adapter, read_adapter_config
from octetrl.run.build import Run
from octetrl.run.device import random_state, restore_random_state
from octetrl.run.run_identity import CHECKPOINTS, read_run_id
from octetrl.trainer import checkpoint

OF_THE_RUN = (  # not the model's: what their names begin with
    "optimizer.safetensors",
    "reference.safetensors",
    "critic",
    "kv_scales.safetensors",
    "cursor.json",
    checkpoint.MANIFEST,
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state of a run after a whole step, without its tensors."""

    step: int
    policy_version: int
    taskset: Mapping[str, Any]
    conversations: Mapping[str, Any] | None
    lengths: Mapping[str, int]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, run: Run, step: int) -> Cursor:
        return cls(
            step=step,
            policy_version=run.workers.policy_version,
            taskset=run.taskset.state(),
            conversations=None if run.conversations is None else run.conversations.state(),
            lengths=dict(run.collection.lengths),
            random=random_state(),
        )

    def put_into(self, run: Run) -> None:
        run.taskset.restore(self.taskset)
        if run.conversations is not None and self.conversations is not None:
            run.conversations.restore(self.conversations)
        run.collection.lengths.clear()
        run.collection.lengths.update(self.lengths)
        restore_random_state(self.random)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Checkpoints:
    """The checkpoints of the run `run_id`, in its folder."""

    def __init__(self, folder: Path, config: CheckpointConfig, run_id: str | None) -> None:
        self.folder, self._config, self._run_id = folder, config, run_id

    def latest_step(self) -> int:
        """Step of the last checkpoint; 0 if the run was cut off before its first one; it then starts again."""
        path = checkpoint.latest_of(self.folder, self._run_id)
        return 0 if path is None else checkpoint.step_of(path)

    def latest_until(self, step: int) -> Path | None:
        """The last checkpoint of `step` or a step before it."""
        return checkpoint.latest_of(self.folder, self._run_id, until=step)

    def save(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        self._save(run, Cursor.of(run, step), metrics)

    def prune(self, exempt_until: Collection[int] = ()) -> None:
        """Keep what the recipe keeps, and for each of `exempt_until` the last checkpoint up to that step."""
        exempt = [path for step in exempt_until if (path := self.latest_until(step)) is not None]
        checkpoint.prune(
            self.folder,
            keep_last=self._config.keep_last,
            keep_best=self._config.keep_best,
            best_metric=self._config.best_metric,
            run_id=self._run_id,
            exempt=[checkpoint.step_of(path) for path in exempt],
        )

    def save_interrupted(self, run: Run, before: Cursor) -> str:
        """Saves the run as it was before the interrupted step, if the weights are unchanged. Returns what was done."""
        at = f"cut off in step {before.step + 1}"
        if before.step == 0:
            return f"{at}: nothing to save yet"
        if before.step == self.latest_step():
            return f"{at}: step {before.step} was already saved; continue with --resume"
        if not run.workers.weights_are_whole or run.workers.policy_version != before.policy_version:
            return f"{at}, while the weights changed: continue from step {self.latest_step()} with --resume"
        self._save(run, before, {})
        return f"{at}: saved step {before.step}; continue with --resume"

    def _save(self, run: Run, cursor: Cursor, metrics: Mapping[str, float]) -> None:
        def write_more(folder: Path) -> None:
            run.workers.save(folder)
            save_tokenizer_files(run.tokenizer, folder)

        payload = {"cursor.json": cursor.as_json()}
        with run.spans("checkpoint"):
            checkpoint.save(
                self.folder, cursor.step, payload, write_more=write_more, metrics=metrics, run_id=self._run_id
            )

    def restore(self, run: Run, step: int) -> None:
        """Verifies and loads the checkpoint of `step`. Raises UserError for a damaged one."""
        saved = checkpoint.load(self.folder / f"step_{step:06d}")
        cursor = Cursor(**saved.json("cursor.json"))
        run.workers.load(saved, cursor.policy_version)
        cursor.put_into(run)


def weights_folder(path: Path) -> Path:
    """The Hugging Face folder of a run folder (its run's last checkpoint), a checkpoint or a model folder."""
    if (path / CHECKPOINTS).is_dir():
        last = checkpoint.latest_of(path / CHECKPOINTS, read_run_id(path))
        if last is None:
            raise UserError(f"run '{path}' has no checkpoint yet; let it reach one, or give a model folder")
        path = last
    if (path / checkpoint.MANIFEST).is_file():
        return checkpoint.load(path).folder
    if (path / "config.json").is_file():
        return path
    if is_adapter(path):
        return path
    raise UserError(
        f"'{path}' is neither a run folder, nor a checkpoint, nor a Hugging Face model folder with config.json"
    )


def trained_model(folder: Path) -> dict[str, Any]:
    """What `folder`, as `weights_folder` gives it, puts into a recipe's model section: path, tokenizer and adapters."""
    if not is_adapter(folder):
        return {"path": str(folder), "tokenizer": None, "lora": None}
    lora, base, _ = read_adapter_config(folder)
    if base is None:
        raise UserError(
            f"the adapter in '{folder}' names no base model (its weights were random, or are stored elsewhere);"
            f" write the base's folder into base_model_name_or_path of its adapter_config.json"
        )
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return {"path": base, "tokenizer": str(folder) if has_tokenizer else None, "lora": lora}
