"""As root, the tests of sandboxes and of code that a user's rights decide, once more as a user without them; elsewhere
they are run so anyway."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.tree import REPO
from tests.required import VARIABLE, lines_of, missing
from tests.unit.process.traces import NO_REACH, NOT_READABLE

TESTS = ["test_attacks.py", "test_escapes.py", "test_limits.py", "test_sandbox.py"]
OF_CODE = REPO / "tests/unit/environments/code"
# Limits that Linux holds for any user alike, clocks, and how many run at once; of the judge what it makes of values,
# within the program's process.
ONCE = (
    "crash_", "test_endless_output", "test_one_that_burns_time", "test_time_burnt_by_children", "test_scorer",
    "test_one_that_never_ends", "test_many_callers",
)  # fmt: skip
JUDGED = (
    "test_right_answers",
    "test_wrong_answers_say_why",
    "test_a_broken_sandbox",
    "looks for files",
    "huge",
    "killed",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_as_nobody(record_property: Callable[[str, object], None]) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("these tests run without root's rights already")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "tests.unit.process.traces", "-m", "pytest", "-rfs"]
    code = "".join(file.read_text() for file in OF_CODE.glob("*.py"))
    assert all(name in code for name in JUDGED), "none of them may be gone unnoticed"
    judged = " or ".join(f"({name.replace(' ', ' and ')})" for name in JUDGED)
    command += ["-k", f"({' and '.join(f'not {name}' for name in ONCE)}) or (test_scorer and ({judged}))"]
    files = [*(here / name for name in TESTS), OF_CODE / "test_scorer.py"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):  # a report of root's is no file that nobody may write
        environment.pop(name, None)
    environment.pop(VARIABLE, None)  # asked of root's tests: a user without rights may have fewer levels, and says so
    run = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    for reason in (NO_REACH, NOT_READABLE):
        if reason in run.stderr:
            missing("another-user", reason)
    for line in lines_of(run.stdout):
        record_property("not run", f"{line}, as a user without rights")
    print(run.stdout[-4000:])
    failed = "\n".join(line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  ")))
    assert run.returncode == 0, f"{failed}\n{run.stdout[-4000:]}{run.stderr[-1000:]}"
    assert " passed" in run.stdout or "[100%]" in run.stdout
