"""A command that is an agent: its words, its output, and its folder."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pydantic import ValidationError

from octetrl.config.environment import AgentConfig
from octetrl.environments.programs import CommandEnvironment, Model, filled_command
from octetrl.process.command import CommandResult, run_command
from octetrl.records import Task

TASK, MODEL = Task("", "say {model}"), Model("http://127.0.0.1:1/v1", "k")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("{prompt}", "say {model}"),
        ("--task={task_id}:{prompt}", "--task=:say {model}"),
        ("{model}/{model}", "policy/policy"),
        ("${other} {1}", "${other} {1}"),
        ('print(f"{answer}") # {prompt}', 'print(f"{answer}") # say {model}'),
    ],
)
def test_each_name_in_a_word_is_replaced_once(word: str, expected: str) -> None:
    assert filled_command(AgentConfig(command=("a", word)), TASK, MODEL) == ["a", expected]


@pytest.mark.parametrize("command", [(), ("",), (" ", "{prompt}"), ("a", "{promt}"), ("a", "Do: {promts}"), ("{x}",)])
def test_a_command_without_a_program_or_with_another_name_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        AgentConfig(command=command)
    assert [one["loc"] for one in error.value.errors()] == [("command",)]


WRITER = """
import os
os.fork() or os.setsid()
while True:
    for number in range(300):
        open(f"{os.getpid()}-{number}", "w").close()
"""


def test_a_command_that_writes_until_it_is_cancelled_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cancelled, seen = Event(), list[Path]()

    def cancel() -> None:
        limit = time.monotonic() + 60.0
        while not seen and time.monotonic() < limit:
            seen.extend(tmp_path.glob("*/*"))
        cancelled.set()

    Thread(target=cancel).start()
    result = run_command([sys.executable, "-c", WRITER], cwd=None, env={}, seconds=60.0, cancelled=cancelled)
    assert result.code is None and seen and not list(tmp_path.iterdir())


def test_output_that_is_not_text_arrives() -> None:
    program = "import sys; sys.stdout.buffer.write(bytes([255]) * (9 << 20))"
    result = run_command([sys.executable, "-c", program], cwd=".", env={}, seconds=60.0)
    assert result.code == 0 and len(result.stdout) == 9 << 20


def test_a_command_has_its_rollouts_time_and_a_folder_until_its_end() -> None:
    given: list[float] = []

    class Watched(Model):
        async def run(self, command: Sequence[str], **options: Any) -> CommandResult:
            given.append(options["seconds"])
            return await Model.run(self, command, **options)

    config = AgentConfig(command=("sh", "-c", "echo *; pwd"))
    environment = CommandEnvironment([], lambda task, text: 0.0, config)
    listed, folder = asyncio.run(environment.agent(Task("t", "x"), Watched("http://127.0.0.1/v1", "key"))).split("\n")
    assert given[0] > 1e6 and listed == "*" and not Path(folder).exists()
