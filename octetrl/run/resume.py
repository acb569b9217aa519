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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from octetrl.config.errors import UserError
from octetrl.models.peft_adapters import is_adapter, read_adapter_config
from octetrl.models.row_shards import STEM
from octetrl.run.batches_ahead import BATCHES, DataPlace, batches_from_json
from octetrl.run.build import Run
from octetrl.run.early import refuse_no_model
from octetrl.run.model_source import found_model
from octetrl.run.run_files import CHECKPOINTS
from octetrl.run.run_identity import read_run_id
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
_Read = TypeVar("_Read")
NOT_OF_A_BRANCH = ("kv_scales.safetensors", "earlier_kv_scales.safetensors", "reference.safetensors")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state of a run after a whole step, without its tensors."""

    step: int
    policy_version: int
    taskset: Mapping[str, Any]
    conversations: Mapping[str, Any] | None
    lengths: Mapping[str, Any]
    random: Mapping[str, Any] | None

    @classmethod
    def of(cls, run: Run, step: int) -> Cursor:
        place = DataPlace.of(run) if run.ahead is None else run.ahead.place
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
        DataPlace(self.taskset, self.lengths, self.random).put_into(run, has_changed=has_changed)

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
        batches = batches_from_json(saved.json(BATCHES))
        if run.ahead is not None:
            run.ahead.put_back(batches, cursor.step)
        elif lost := sum(len(one.groups) for one in batches):
            run.console.note(f"{lost} saved groups are sampled again, because cluster.max_staleness is 0 now")


def branch(run: Run, source: str) -> str:
    """Loads weights, optimizer and critic of another run, for the first step of this one. Returns a note.

    Schedule, order of data and counts start from the beginning. A calibrated cache is calibrated again, and a reference
    has these weights."""
    saved = checkpoint.load(weights_folder(Path(source)))
    taken = tuple(name for name in saved.files if name not in NOT_OF_A_BRANCH)
    run.workers.load(replace(saved, files=taken), 0)
    return f"begins with weights and optimizer of {saved.folder}"


def weights_folder(path: Path) -> Path:
    """The Hugging Face folder of a run folder (its run's last checkpoint), `RUN@STEP`, a checkpoint, a model folder, or
    a name of the hub (model_source.py)."""
    return read_model(path, lambda folder: folder)


def read_model(name: str | Path, read: Callable[[Path], _Read]) -> _Read:
    """Return `read(folder)` for the verified `weights_folder` of `name`.

    A run that is still training may prune the checkpoint meanwhile. Then its new last checkpoint is read, once. Raises
    UserError if that was pruned too, or if one step was asked for. See `refuse_pruned`.
    """
    for attempt in (1, 2):
        folder, of_run = _chosen(Path(name))
        is_checkpoint = of_run or (folder / checkpoint.MANIFEST).is_file()
        try:
            return read(_verified(folder))
        except Exception as error:
            if not is_checkpoint or folder.is_dir():
                raise
            if attempt == 2 or not of_run:
                raise _pruned(folder) from error
    raise AssertionError("the second attempt returns or raises")


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint by its folder's name; 0 for a model that is none."""
    number = folder.name.removeprefix("step_")
    return int(number) if number != folder.name and number.isdecimal() else 0


def refuse_pruned(folder: Path) -> None:
    """Raise UserError if `folder` is gone. `read` calls it after files that may be absent: they were, or are gone."""
    if not folder.is_dir():
        raise _pruned(folder)


def _pruned(folder: Path) -> UserError:
    return UserError(
        f"checkpoint '{folder}' was deleted while it was read, as its run keeps only the last ones; give the command"
        f" again, or raise the run's checkpoint.keep_last"
    )


def _chosen(name: Path) -> tuple[Path, bool]:
    """The folder of a model that a name stands for, not verified, and whether it is the last checkpoint of a run."""
    path = found_model(name)
    if not (path / CHECKPOINTS).is_dir():
        return path, False
    last = checkpoint.latest_of(path / CHECKPOINTS, read_run_id(path))
    if last is None:
        raise UserError(f"run '{path}' has no checkpoint yet; let it reach one, or give a model folder")
    return last, True


def _verified(path: Path) -> Path:
    if (path / checkpoint.MANIFEST).is_file():
        return checkpoint.load(path).folder
    if (path / "config.json").is_file():
        return path
    if is_adapter(path):
        return path
    return refuse_no_model(path)


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
