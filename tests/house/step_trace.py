"""Follow one GRPO step on a CPU and count what a reader of it would meet: `python -m tests.house.step_trace [--files]`.

Traced are `produce` and `learn` of one step: 2 prompts, 2 answers each of 12 tokens, one thread. Printed as JSON: the
files of the package that were entered, the lines in them, functions and executed lines. `--files` lists the files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from octetrl.run.build import build_run
from octetrl.run.folder.journal import NO_FILES
from octetrl.run.loop import _calibrate_first
from octetrl.run.state import Run
from octetrl.run.step import GenerateThenLearn
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.house.tree import REPO

PACKAGE = f"{REPO / 'octetrl'}/"


class Trace:
    """Lines and functions that were executed, by file of the package."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.functions: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return None
        if event == "call":
            self.functions[path].add(frame.f_code.co_qualname)
        self.lines[path].add(frame.f_lineno)
        return self

    def counts(self) -> dict[str, int]:
        return {
            "files": len(self.lines),
            "lines": sum(map(length, self.lines)),
            "functions": sum(map(len, self.functions.values())),
            "executed": sum(map(len, self.lines.values())),
        }


def length(path: str) -> int:
    return len(Path(path).read_text(encoding="utf-8").splitlines())


def trace_step(run: Run) -> Trace:
    trace = Trace()
    _calibrate_first(run)
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        GenerateThenLearn().step(run, 1, NO_FILES)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        run.close()
    return trace


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        changes = {"rollout.group_size": 2, "evaluation.every": 0, "trainer.activation_checkpointing": "attention"}
        recipe = tiny_recipe(make_model(Path(folder) / "model"), Path(folder) / "run", changes)
        trace = trace_step(build_run(recipe))
    if "--files" in sys.argv:
        for path, lines in sorted(trace.lines.items(), key=lambda item: -len(item[1])):
            print(path.removeprefix(PACKAGE), length(path), len(lines), len(trace.functions[path]))
    print(json.dumps(trace.counts()))


if __name__ == "__main__":
    main()
