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
from functools import cached_property
from typing import Any

from octetrl.config.errors import UserError
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import EnvironmentConfig
from octetrl.config.validate_sandbox import MARGIN_SECONDS
from octetrl.environments.base import TaskEnvironment
from octetrl.environments.code import contestant, judging, link, remote, wire
from octetrl.environments.code.bundle import bundled
from octetrl.environments.code.cases import TaskTests, last_python_block, read_tests, same_output
from octetrl.environments.sandbox.levels import Level
from octetrl.environments.sandbox.limits import Limits, Outcome, SandboxStatus
from octetrl.environments.sandbox.sandbox import Program, Sandbox, sandbox_for
from octetrl.environments.score import Explained
from octetrl.records import Task

_JUDGE_SECONDS = 2  # that the judge may outlive the code
_START_SECONDS = 0.1  # of a sandbox, on a busy machine


class JudgementFailed(RuntimeError):
    """There is no verdict, and the code is not the cause."""


@dataclass(frozen=True)
class CodeScorer:
    """1.0 if all tests of the task pass, else 0.0; partial: the share of tests that pass."""

    config: SandboxConfig = field(default_factory=SandboxConfig)
    partial: bool = False

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
        _ = self._sandbox  # in the reward worker: tried out before the first call, whose time is limited

    @cached_property
    def _sandbox(self) -> Sandbox:
        return sandbox_that_judges(self.config)

    @cached_property
    def _contestant(self) -> str:
        return bundled(wire, contestant)

    @cached_property
    def _judge(self) -> str:
        return bundled(wire, remote, link, judging)

    def _call(self, tests: TaskTests, source: str) -> tuple[list[bool], str]:
        """Judge asserts or calls, in two sandboxes that are connected by a socket."""
        limits = Limits.from_config(self.config)
        contestant = Program(self._contestant, json.dumps({"source": source}), limits=limits)
        order = {"form": tests.form, "cases": tests.cases, "function": tests.function}
        seconds = limits.wall_seconds + _JUDGE_SECONDS
        of_judge = replace(Limits(), wall_seconds=seconds, cpu_seconds=math.ceil(seconds))
        played, judged = self._sandbox.run_pair(contestant, Program(self._judge, json.dumps(order), limits=of_judge))
        _refuse_failures(played, judged)
        if played.status is SandboxStatus.BROKE_SANDBOX:
            return [False] * len(tests.cases), f"{played.status}: {played.detail}"
        verdict = _verdict(judged, len(tests.cases))
        if "broken" in verdict:
            raise JudgementFailed(verdict["broken"])
        was_ended = played.status not in (SandboxStatus.OK, SandboxStatus.ERROR)
        return [mark == "1" for mark in verdict["passed"]], played.status if was_ended else verdict["why"]

    def _run_programs(self, tests: TaskTests, source: str) -> tuple[list[bool], str]:
        """Run each program in a sandbox of its own. If all tests must pass, stop at the first that fails."""
        limits, passed, why = Limits.from_config(self.config), [], ""
        for number, case in enumerate(tests.cases, 1):
            outcome = self._sandbox.run(Program(source, case["stdin"], limits))
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


def sandbox_that_judges(config: SandboxConfig) -> Sandbox:
    """Raises UserError for a level at which the code could read its tests."""
    sandbox = sandbox_for(config)
    if sandbox.level is Level.LIMITS:
        raise UserError(
            "environment.sandbox.level: limits does not judge code, which could read the tests from the disk or from"
            " the run's memory; use landlock (Linux 5.13, switched on) or install bubblewrap"
        )
    return sandbox


def code_environment(tasks: Sequence[Task], config: EnvironmentConfig) -> TaskEnvironment:
    """Raises UserError if tests have none of the forms, if the time is too short, or if there is no such sandbox."""
    programs = 0
    for task in tasks:
        tests = read_tests(task)
        programs = max(programs, len(tests.cases) if tests.form == "programs" else 0)
    given, seconds = config.reward_timeout_seconds, config.sandbox.wall_seconds
    needed = seconds + MARGIN_SECONDS + programs * _START_SECONDS
    if given < needed:
        raise UserError(
            f"environment.reward_timeout_seconds: {given:g} is too short for {programs} programs a task, each in a"
            f" sandbox of its own, and sandbox.wall_seconds {seconds:g}; raise it to {needed:g}"
        )
    sandbox_that_judges(config.sandbox)
    return TaskEnvironment(tasks, CodeScorer(config.sandbox, partial=config.code_reward == "share"))


def _verdict(judged: Outcome, cases: int) -> dict[str, Any]:
    """The judge's verdict. If it ends without one, its tests are broken, unless it already used an answer of the code.
    Then the score is 0: an answer that is slow to compare must not prevent a 0."""
    lines = judged.stdout.splitlines()
    if judged.ok and lines and lines[-1] not in (judging.READY, judging.TAKEN):
        verdict: dict[str, Any] = json.loads(lines[-1])
        return verdict
    said = f"the tests ended without a verdict: {judged.status}, {_last_line(judged.stderr)}".removesuffix(", ")
    has_waited = judged.status is SandboxStatus.WALL_TIMEOUT and judging.READY not in lines
    if judging.TAKEN not in lines and not has_waited:
        raise JudgementFailed(said)
    return {"passed": "0" * cases, "why": said}


def _refuse_failures(*outcomes: Outcome) -> None:
    for outcome in outcomes:
        if outcome.status is SandboxStatus.FAILED_SANDBOX:
            raise JudgementFailed(f"the sandbox failed: {outcome.detail}")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:200]
