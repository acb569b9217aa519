"""The folder of `octetrl eval --out FOLDER`: results and answers, as `octetrl rollouts` and `octetrl report` read them.

    eval.json                        all results, with the outcome of every task
    config.yaml                      the recipe with every field resolved
    metrics.jsonl                    one line: the numbers, under the checkpoint's step (0: no checkpoint)
    rollouts/step_NNNNNN.jsonl       every completion (telemetry/rollouts.py)

With several targets, the last three are in a folder for each, `1_NAME/`, `2_NAME/`, ...
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from octetrl.cli.out_file import refuse_unmakeable, writes
from octetrl.system.errors import UserError
from octetrl.system.folder_lock import folder_lock

if TYPE_CHECKING:
    from octetrl.config.schema import Recipe
    from octetrl.telemetry.eval_report import EvalReport


def is_json(out: str) -> bool:
    """Whether `--out` names one file of results."""
    return Path(out).suffix == ".json"


def refuse_folder(out: str) -> None:
    """Raise UserError if `out` can't be the folder of an evaluation."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds files already" if path.is_dir() else "is a file"
        raise UserError(f"--out: '{out}' {what}; give a new folder, or a file such as eval.json")
    missing = [one for one in (path, *path.parents) if not one.exists()]
    refuse_unmakeable("--out", missing[-1] if missing else path)


@contextmanager
def reserved(out: str) -> Iterator[Path]:
    """The folder, created, and locked against another evaluation until the end. If it stays empty, it is removed again.

    Raises UserError."""
    folder = Path(out)
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    with ExitStack() as stack:
        with writes("--out", folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(folder_lock(folder)):
                raise UserError(f"--out: another evaluation is writing '{out}'; give a new folder")
        stack.callback(_remove_empty, missing)
        refuse_folder(out)  # an evaluation may have ended meanwhile
        yield folder


def _remove_empty(folders: Sequence[Path]) -> None:
    """The innermost first, up to one that is not empty."""
    with suppress(OSError):
        for one in folders:
            one.rmdir()


def write_folder(folder: Path, recipe: Recipe, reports: Mapping[str, EvalReport], results: str) -> None:
    """Write an evaluation. `results`: the JSON of all. If that fails, as on a full disk, nothing of it stays."""
    from octetrl.config.load import dump_recipe
    from octetrl.telemetry.rollouts import ROLLOUTS, write_rollouts

    aside = folder / f".{os.getpid()}.partial"
    with writes("--out", folder, "folder"):
        aside.mkdir()
        try:
            for place, (target, report) in enumerate(reports.items(), start=1):
                name = re.sub(r"[^\w.@-]+", "_", Path(target).resolve().name)
                of_target = aside if len(reports) == 1 else aside / f"{place}_{name}"
                (of_target / ROLLOUTS).mkdir(parents=True)
                write_rollouts(of_target / ROLLOUTS, report.step, report.groups)
                row = json.dumps({"step": report.step, **report.metrics})
                (of_target / "metrics.jsonl").write_text(row + "\n", encoding="utf-8")
                (of_target / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
            (aside / "eval.json").write_text(results, encoding="utf-8")
            for written in sorted(aside.iterdir()):
                written.rename(folder / written.name)
        finally:
            shutil.rmtree(aside)
