"""The reward of a completion that is Python code: the share of its task's tests that pass, or whether all do.

The code is the last ```python block. How tests and code are kept apart: `judging.py`; a program is run once a case and
what it prints is compared here. Whatever the code does is a reward, with the reason where it is not 1 (`Explained`):

    "no ```python block"    "3 of 5 tests pass; test 2: wrong"    "0 of 5 tests pass; memory_limit"

Failures that the code did not cause raise an exception and become a reward_error: a sandbox that could not be created,
a test that can't be run. `wall_seconds` limits all tests of a completion together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from octetrl.config.rules_environment import MARGIN_SECONDS
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import EnvironmentConfig
from octetrl.environments.code_tests import TaskTests, last_python_block, output_bytes, read_tests, same_output
from octetrl.environments.scoring import Explained
from octetrl.environments.tasks import TaskEnvironment
from octetrl.process.judge import contestant_program, judge_program, judging, wire
from octetrl.process.judge.link import ENDED
from octetrl.process.sandbox import Limits, Outcome, Program, SandboxStatus, sandbox_for
from octetrl.records import Task
from octetrl.system.errors import UserError

_TEST_SECONDS = 2.0  # of the tests themselves, besides the seconds in which they wait for the code
_ENDING_SECONDS = 2.5  # of a reward's time, for the end of its sandboxes
_CODE_OUTLIVES = 0.5  # seconds by which the code's sandbox outlives the judge's
_PACKAGES = ("numpy", "pandas", "scipy", "sympy", "sortedcontainers")  # that models like to import
_START_SECONDS = 0.1  # of a sandbox, on a busy machine


class JudgementFailed(RuntimeError):
    """There is no verdict, and the code is not the cause."""


@dataclass(frozen=True)
class CodeScorer:
    """1.0 if all tests of the task pass, else 0.0; partial: the share of tests that pass. test_seconds: how long the
    tests themselves may take."""

    config: SandboxConfig = field(default_factory=SandboxConfig)
    partial: bool = False
    test_seconds: float = _TEST_SECONDS

    def __call__(self, task: Task, completion_text: str) -> Explained:
        tests, source = read_tests(task), last_python_block(completion_text)
        if source is None:
            return Explained(0.0, "no ```python block")
        judged = self._run_programs if tests.form == "programs" else self._call
        passed, why = judged(tests, source)
        if all(passed):
            return Explained(1.0)
        share = sum(passed) / len(passed)
        return Explained(share if self.partial else 0.0, f"{sum(passed)} of {len(passed)} tests pass; {why}")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        sandbox_for(self.config)  # in the reward worker: tried out before the first call, whose time is limited

    def _call(self, tests: TaskTests, source: str) -> tuple[list[bool], str]:
        """Judge asserts or calls, in two sandboxes that are connected by a socket."""
        limits = Limits.from_config(self.config)
        seconds = limits.wall_seconds + self.test_seconds
        of_code = replace(limits, wall_seconds=seconds + _CODE_OUTLIVES)  # the judge counts the seconds of the code
        of_judge = replace(Limits(), wall_seconds=seconds, cpu_seconds=math.ceil(seconds))
        order = {
            "cases": tests.cases,
            "function": tests.function,
            "names": sorted(tests.names.names),
            "classes": sorted(tests.names.classes),
            "exceptions": sorted(tests.names.exceptions),
            "seconds": limits.wall_seconds,
            "test_seconds": self.test_seconds,
        }
        played, judged = sandbox_for(self.config).run_pair(
            Program(contestant_program(), json.dumps({"source": source, "seconds": limits.wall_seconds}), of_code),
            Program(judge_program(), json.dumps(order), of_judge),
        )
        _refuse_failures(played, judged)
        if played.status is SandboxStatus.BROKE_SANDBOX:
            return [False] * len(tests.cases), f"{played.status}: {played.detail}"
        verdict = _verdict(judged, len(tests.cases))
        if "broken" in verdict:
            raise JudgementFailed(verdict["broken"])
        was_ended = played.status not in (SandboxStatus.OK, SandboxStatus.ERROR) and verdict["why"] == ENDED
        return [mark == "1" for mark in verdict["passed"]], played.status if was_ended else verdict["why"]

    def _run_programs(self, tests: TaskTests, source: str) -> tuple[list[bool], str]:
        """Run each program in a sandbox of its own. If all tests must pass, stop at the first that fails."""
        limits, passed, why = Limits.from_config(self.config), [], ""
        for number, case in enumerate(tests.cases, 1):
            outcome = sandbox_for(self.config).run(Program(source, case["stdin"], limits))
            _refuse_failures(outcome)
            passed.append(outcome.ok and same_output(outcome.stdout, case["stdout"]))
            if not passed[-1]:
                ended = "wrong output" if outcome.ok else outcome.status.value
                detail = _last_line(outcome.stderr) if outcome.status is SandboxStatus.ERROR else outcome.detail or ""
                why = why or f"test {number}: {ended}{detail and ', ' + detail}"
            limits = replace(limits, wall_seconds=limits.wall_seconds - outcome.seconds)
            if not (passed[-1] or self.partial) or limits.wall_seconds <= 0:
                why = why or SandboxStatus.WALL_TIMEOUT.value
                break
        return passed + [False] * (len(tests.cases) - len(passed)), why


def code_environment(tasks: Sequence[Task], config: EnvironmentConfig) -> TaskEnvironment:
    """Raises UserError if tests have a fault, if the time is too short, or if there is no such sandbox."""
    programs, faults = 0, []
    sandbox_for(config.sandbox)
    for task in tasks:
        try:
            tests = read_tests(task)
        except UserError as error:
            faults.append(str(error))
            continue
        if fault := _cannot_pass(tests, config.sandbox):
            faults.append(f"task '{task.id}'{fault}")
        programs = max(programs, len(tests.cases) if tests.form == "programs" else 0)
    if faults:
        more = f" ({len(faults) - 1} other tasks have a fault too)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{more}")
    given, seconds = config.reward_timeout_seconds, config.sandbox.wall_seconds
    needed = seconds + MARGIN_SECONDS + programs * _START_SECONDS
    if given < needed:
        raise UserError(
            f"environment.reward_timeout_seconds: {given:g} is too short for {programs} programs a task, each in a"
            f" sandbox of its own, and sandbox.wall_seconds {seconds:g}; raise it to {needed:g}"
        )
    test_seconds = max(_TEST_SECONDS, given - seconds - _ENDING_SECONDS)
    partial = config.code_reward == "share"
    return TaskEnvironment(tasks, CodeScorer(config.sandbox, partial=partial, test_seconds=test_seconds))


def _cannot_pass(tests: TaskTests, config: SandboxConfig) -> str | None:
    """What keeps any code from passing these tests in this sandbox."""
    if lacking := lacking_packages(config, tuple(sorted(tests.names.imports))):
        named = " and ".join(lacking)
        return f": its tests import {named}, which the sandbox's Python lacks; set environment.sandbox.python"
    for number, case in enumerate(tests.cases, 1):
        if tests.form == "programs" and (size := output_bytes(case["stdout"])) > config.output_kib * 1024:
            kib = math.ceil(size / 1024)
            return f", test {number}: 'stdout' has {kib} KiB; raise environment.sandbox.output_kib to {kib}"
        if tests.form == "calls" and (size := len(json.dumps(case["expected"]))) > wire.LONGEST_LINE:
            return f", test {number}: 'expected' has {size >> 20} MiB; an answer has at most {wire.LONGEST_LINE >> 20}"
    return None


@cache
def lacking_packages(config: SandboxConfig, packages: tuple[str, ...] = _PACKAGES) -> tuple[str, ...]:
    """Those of `packages` that the sandbox's Python can't import."""
    if not packages:
        return ()
    source = f"import importlib.util\nprint(*[name for name in {packages} if not importlib.util.find_spec(name)])"
    outcome = sandbox_for(config).run(Program(source, limits=Limits(wall_seconds=30.0, cpu_seconds=30)))
    if not outcome.ok:
        raise UserError(f"environment.sandbox: a program that looks for packages ended with {outcome.status}")
    return tuple(outcome.stdout.split())


def packages_line(config: SandboxConfig) -> str | None:
    """A line for check and the start of a run: what the model's code can't import."""
    lacking = lacking_packages(config)
    if not lacking:
        return None
    named = ", ".join(lacking)
    return f"the code's Python has no {named}: code that imports it scores 0; environment.sandbox.python names another"


def _verdict(judged: Outcome, cases: int) -> dict[str, Any]:
    """The judge's verdict. If it ends without one, its tests are broken, unless the code has run. Then the score is 0:
    an answer that is slow to compare must not prevent a 0."""
    lines = judged.stdout.splitlines()
    if judged.ok and lines and lines[-1] != judging.ASKED:
        verdict: dict[str, Any] = json.loads(lines[-1])
        return verdict
    said = f"the tests ended without a verdict: {judged.status}, {_last_line(judged.stderr)}".removesuffix(", ")
    if judging.ASKED not in lines:
        raise JudgementFailed(said)
    return {"passed": "0" * cases, "why": said}


def _refuse_failures(*outcomes: Outcome) -> None:
    for outcome in outcomes:
        if outcome.status is SandboxStatus.FAILED_SANDBOX:
            raise JudgementFailed(f"the sandbox failed: {outcome.detail}")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:200]
