"""What a resumed run may change, and the record of it.

`logging`, `steps` and some other sections may always change. `octetrl train R --resume --allow FIELD=VALUE` changes a
field that affects what is computed from the next step on: the learning rate, the objective's settings, the lengths. A
field that the checkpoint's state depends on (model, precision, tasks, format of the optimizer's states) can't change;
a new run can start from the weights instead.

Each change is a line of `history.jsonl` in the run's folder: {"step", "field", "old", "new"}. `step` is the last step
with the old value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError
from octetrl.telemetry.sinks import HISTORY_FILE, read_objects

MAY_CHANGE = (
    *("steps", "output_dir", "logging", "cluster", "evaluation", "checkpoint", "mismatch", "collapse", "failures"),
    *("environment.max_failure_share", "early_stopping"),  # when to stop; they compute nothing
    *("epochs", "data.eval_dataset", "data.eval_split"),
)
CANNOT_CHANGE = (
    *("precision", "model", "fp8", "data", "seed", "critic.path"),
    *("algorithm.name", "algorithm.conversations", "algorithm.teacher", "algorithm.teacher_precision"),
    *("environment.kind", "environment.dataset", "environment.columns", "environment.parameters"),
    *("environment.split", "environment.subset", "environment.eval_split", "environment.eval_dataset"),
    *("environment.train_size", "environment.eval_size", "environment.seed", "environment.prompt_template"),
    *("trainer.optimizer.states", "trainer.optimizer.master", "trainer.optimizer.offload"),
    *("critic.optimizer.states", "critic.optimizer.master", "critic.optimizer.offload"),
)

CONTENT = re.compile(  # what may be allowed without a value: a digest of it is kept (contents.py)
    r"chat_template|algorithm\.(conversations|name)|data\.sources\.[^=]+|data\.eval_dataset(\.[^=]+)?"
    r"|(environment|environments\.[^.=]+)\.(dataset|eval_split|eval_dataset|reward|tools|corpus)"
)
_IS_ENVIRONMENT = re.compile(r"^environments\.[^.]+")


@dataclass(frozen=True, slots=True)
class Change:
    """A field whose value differs from the saved recipe's."""

    field: str
    old: Any
    new: Any

    @property
    def text(self) -> str:
        if _IS_ENVIRONMENT.fullmatch(self.field):
            return f"{self.field} is {'missing' if self.new is None else 'new'}"
        return f"{self.field} is {json.dumps(self.new)}, was {json.dumps(self.old)}"


def changes_between(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The differing fields of two recipes as plain data, except those that may always change."""
    return [change for change in _differences(saved, now, "") if not _is_below(_in_general(change.field), MAY_CHANGE)]


def refuse_changes(folder: Path, changes: Collection[Change], allowed: Collection[str], saved: Recipe) -> None:
    """Raise UserError for the changes that are not allowed, with both values of each."""
    fixed = [change for change in changes if _is_below(_in_general(change.field), CANNOT_CHANGE)]
    if fixed:
        raise UserError(
            f"--resume: '{folder}' was started with another recipe: {_listed(fixed)}; its checkpoint depends on"
            f" {'this' if len(fixed) == 1 else 'these'}, so resume it with its own config.yaml{_or_from(fixed)}, or"
            " start again in another output_dir"
        )
    others = [change for change in changes if not _is_below(change.field, allowed)]
    if others:
        allow = " ".join(f"--allow {change.field}={json.dumps(change.new)}" for change in others[:3])
        raise UserError(
            f"--resume: '{folder}' was started with another recipe: {_listed(others)}; resume it with its own"
            f" config.yaml, or change it from here on with {allow}"
        )
    if any(change.field == "algorithm.kl_coefficient" for change in changes) and not saved.algorithm.keeps_reference:
        raise UserError(
            "--allow algorithm.kl_coefficient: the run has no reference model to measure the KL against; start again in"
            " another output_dir"
        )


def refuse_contents(folder: Path, changed: Mapping[str, Collection[str]], allowed: Collection[str]) -> None:
    """Raise UserError for changed contents (contents.py) that are not allowed. changed: the parts by field."""
    others = {field: parts for field, parts in changed.items() if field not in allowed}
    if others:
        listed = "; ".join(f"{field} ({', '.join(sorted(parts)[:3])})" for field, parts in others.items())
        raise UserError(
            f"--resume: what '{folder}' learns from has changed since it began: {listed}; put it back, or go on with it"
            f" as it is now with {' '.join(f'--allow {field}' for field in others)}"
        )


def changed_after(folder: Path, step: int) -> set[str]:
    """The fields that the folder's history has as changed at `step` or later."""
    lines = read_objects(folder / HISTORY_FILE)
    return {str(line.get("field")) for line in lines if isinstance(line.get("step"), int) and line["step"] >= step}


def _or_from(changes: Collection[Change]) -> str:
    """The option that is missing where the run began with the weights of another one."""
    paths = [change.old for change in changes if change.field == "model.path" and isinstance(change.old, str)]
    found = [re.fullmatch(r"(.+)/checkpoints/step_0*(\d+)", path) for path in paths]
    return "".join(f" or with --from {one[1]}@{one[2]}, with which it began" for one in found if one)


def record_changes(folder: Path, step: int, changes: Collection[Change]) -> None:
    """Append the changes to the folder's history."""
    if changes:
        lines = [
            json.dumps({"step": step, "field": change.field, "old": change.old, "new": change.new}) + "\n"
            for change in changes
        ]
        with (folder / HISTORY_FILE).open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _differences(old: Any, new: Any, name: str) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new and not _is_same_path(old, new):
        yield Change(name, old, new)


def _is_same_path(old: Any, new: Any) -> bool:
    """Whether both lead to one file or folder, as a relative and an absolute path do."""
    with suppress(OSError, TypeError, ValueError):  # no paths, or none that exist
        return not isinstance(old, int) and not isinstance(new, int) and os.path.samefile(old, new)
    return False


def _in_general(field: str) -> str:
    """The field of one of several environments as that of a single one. A whole environment is like its tasks."""
    if _IS_ENVIRONMENT.fullmatch(field):
        return "environment.dataset"
    return _IS_ENVIRONMENT.sub("environment", field)


def _is_below(field: str, sections: Collection[str]) -> bool:
    return any(field == section or field.startswith(f"{section}.") for section in sections)


def _listed(changes: Collection[Change]) -> str:
    shown = [change.text for change in list(changes)[:5]]
    return "; ".join([*shown, f"and {len(changes) - 5} more"] if len(changes) > 5 else shown)
