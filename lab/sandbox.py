"""Measures the cost of a sandbox: one run at each level, and one verdict on code by each form of tests.

    python -m lab.sandbox [--runs 30] [--out FOLDER]

The figures are milliseconds of a call, median and 95th percentile, with one caller. Then as many callers as cores run
at once, in runs per second. "no sandbox" is the same program by `subprocess`: the cost of starting Python. Levels that
this machine does not support are left out and named.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lab.record import RESULTS, show, write_result
from octetrl.config.sandbox import SandboxConfig
from octetrl.environments.code_scorer import CodeScorer
from octetrl.process.levels import Level
from octetrl.process.sandbox import Program, Sandbox, find_sandbox
from octetrl.records import Task
from octetrl.system.errors import UserError

PROGRAM = "print(6 * 7)"
CODE = "```python\ndef add(a, b): return a + b\nif __name__ == '__main__': print(add(*map(int, input().split())))\n```"
TESTS: dict[str, list[object]] = {
    "10 calls": [{"args": [number, 1], "expected": number + 1} for number in range(10)],
    "10 asserts": [f"assert add({number}, 1) == {number + 1}" for number in range(10)],
    "3 programs": [{"stdin": f"{number} 1\n", "stdout": f"{number + 1}\n"} for number in range(3)],
}


def milliseconds(call: Callable[[], object], runs: int) -> list[float]:
    call()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return times


def row(what: str, sandbox: Sandbox, call: Callable[[], object], runs: int) -> dict[str, object]:
    times = milliseconds(call, runs)
    cores = os.cpu_count() or 1
    began = time.perf_counter()
    with ThreadPoolExecutor(cores) as threads:
        for _ in threads.map(lambda _: call(), range(runs)):
            pass
    return {
        "workload": what,
        "precision": "none",
        "level": sandbox.level.value,
        "interpreter": sandbox.interpreter.executable.rpartition("/")[2],
        "ms": statistics.median(times),
        "p95_ms": statistics.quantiles(times, n=20)[-1],
        "callers": cores,
        "runs_per_second": runs / (time.perf_counter() - began),
    }


def judged(scorer: CodeScorer, tests: list[object]) -> None:
    score = scorer(Task("add", "", metadata={"tests": tests, "function": "add"}), CODE)
    assert score == 1.0, score.detail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    rows: list[dict[str, object]] = []
    for level in Level:
        try:
            sandbox = find_sandbox(level)
        except UserError as error:
            print(error)
            continue
        command = [sandbox.interpreter.executable, "-I", "-B", "-c", PROGRAM]
        bare = partial(subprocess.run, command, capture_output=True, check=True, env={})
        rows.append(row(f"no sandbox, for {level}", sandbox, bare, asked.runs))
        rows.append(row(PROGRAM, sandbox, partial(sandbox.run, Program(PROGRAM)), asked.runs))
    scorer = CodeScorer(SandboxConfig())
    for what, tests in TESTS.items():
        rows.append(row(what, find_sandbox(), partial(judged, scorer, tests), asked.runs))
    show(rows, f"{os.cpu_count()} cores")
    write_result("sandbox", "cpu", rows, asked.out)


if __name__ == "__main__":
    main()
