"""The folder of `octetrl eval --out FOLDER`: results and answers, as `octetrl rollouts` and `octetrl report` read them.

    eval.json                        all results, with the outcome of every task
    config.yaml                      the recipe with every field resolved
    metrics.jsonl                    one line: the numbers, under the checkpoint's step (0: no checkpoint)
    rollouts/step_NNNNNN.jsonl       every completion (telemetry/rollouts.py)

With several targets, the last three are in a folder for each, `1_NAME/`, `2_NAME/`, ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octetrl.cli.out_file import refuse_unmakeable
from octetrl.config.errors import UserError

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


def write_folder(folder: Path, recipe: Recipe, reports: Mapping[str, EvalReport]) -> Path:
    """Write everything but the results as JSON. Return the path for those."""
    from octetrl.config.load import dump_recipe
    from octetrl.telemetry.rollouts import ROLLOUTS, RolloutFiles

    try:
        for place, (target, report) in enumerate(reports.items(), start=1):
            name = re.sub(r"[^\w.@-]+", "_", Path(target).resolve().name)
            of_target = folder if len(reports) == 1 else folder / f"{place}_{name}"
            RolloutFiles(of_target / ROLLOUTS).write(report.step, report.groups)
            row = json.dumps({"step": report.step, **report.metrics})
            (of_target / "metrics.jsonl").write_text(row + "\n", encoding="utf-8")
            (of_target / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write in '{folder}' ({error.strerror}); give another folder") from error
    return folder / "eval.json"
