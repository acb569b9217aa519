"""The model that a name stands for (model_source.py), verified: its folder, and its part of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from octetrl.models.peft_adapters import is_adapter, read_adapter_config
from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.run.folder.output_folder import read_run_id
from octetrl.run.model_source import found_model, refuse_no_model
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint

_Read = TypeVar("_Read")


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
