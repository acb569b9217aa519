"""Tools that a recipe names, and an environment that lets the policy call them before it answers.

    environment: {kind: math, dataset: gsm8k.jsonl, tools: [calculator, python]}

The tasks and the score do not change. The last message, which has no call, is scored.

**Python.** Each call runs one program in a sandbox of its own and shows what it printed. No variable and no file is
kept between calls, so a call can run anywhere and can be repeated. If the last line is an expression, its value is
printed as in a notebook, because models often leave out the `print`. If the program did not end normally, a line before
its output says how it ended. If the sandbox could not be created, the program is not the cause: the tool raises an
exception, and the rollout's status records it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.sandbox import SandboxConfig
from octetrl.environments.python_object import load_object
from octetrl.environments.scoring import Scorer
from octetrl.environments.tasks import Environment
from octetrl.environments.tools.calculator import calculator
from octetrl.environments.tools.definition import Tool
from octetrl.environments.tools.search import search_tool
from octetrl.process.sandbox import Limits, Outcome, Program, SandboxStatus, sandbox_for
from octetrl.records import Task
from octetrl.system.errors import UserError, type_of

_ENDINGS = {
    SandboxStatus.ERROR: "The program failed.",
    SandboxStatus.CRASHED: "The program crashed.",
    SandboxStatus.KILLED: "The program was killed.",
    SandboxStatus.WALL_TIMEOUT: "The program took too long and was ended.",
    SandboxStatus.CPU_LIMIT: "The program computed for too long and was ended.",
    SandboxStatus.MEMORY_LIMIT: "The program ran out of memory.",
    SandboxStatus.DISK_LIMIT: "The program wrote too much to its disk.",
    SandboxStatus.OUTPUT_LIMIT: "The program printed too much and was ended.",
    SandboxStatus.BROKE_SANDBOX: "The program broke the sandbox and was ended.",
}
_PROGRAM_FILE = re.compile(r'File "[^"]*/main\.py"')  # in a folder of another name each time
_DESCRIPTION = (
    "Run a Python program and read what it prints. Each program starts from scratch: define and import all that it"
    " needs. There is no network."
)


def python_tool(
    config: SandboxConfig | None = None,
    *,
    name: str = "python",
    description: str = _DESCRIPTION,
    max_letters: int = 2000,
) -> Tool:
    """A tool that runs programs in the sandbox of `config` (None: its defaults). The middle of a long output is left
    out. Raises UserError if this machine has no such sandbox."""
    config = config or SandboxConfig()
    sandbox_for(config)
    return Tool(_Python(config, max_letters), name=name, description=description)


@dataclass(frozen=True, slots=True)
class _Python:
    config: SandboxConfig
    max_letters: int

    def __call__(self, code: Annotated[str, Field(description="The program; print what you want to see.")]) -> str:
        program = Program(with_last_value_printed(code), limits=Limits.from_config(self.config))
        outcome = sandbox_for(self.config).run(program)
        if outcome.status is SandboxStatus.FAILED_SANDBOX:
            raise RuntimeError(f"the sandbox failed: {outcome.detail}")
        return _report(outcome, self.max_letters)


def with_last_value_printed(code: str) -> str:
    """`code`, made to print the value of its last line, if that is an expression; None is not printed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return code  # running the program reports the error
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or last.end_lineno is None:
        return code
    lines = code.encode().splitlines(keepends=True)  # offsets of the tree are in bytes
    before = b"".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    value = ast.get_source_segment(code, last.value)
    return f"{before.decode()}_ = ({value}\n)\nif _ is not None:\n    print(repr(_))\n"  # lines keep their numbers


def _report(outcome: Outcome, letters: int) -> str:
    stderr = _PROGRAM_FILE.sub('File "program.py"', outcome.stderr).replace("Traceback (most recent call last):\n", "")
    parts = [_ENDINGS.get(outcome.status, ""), outcome.stdout.strip(), stderr.strip()]
    text = "\n".join(part for part in parts if part) or "The program printed nothing."
    if len(text) <= letters:
        return text
    half = letters // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


@dataclass(frozen=True)
class ToolEnvironment:
    """Tasks and a score, with tools that the policy may call before it answers."""

    tasks: Sequence[Task]
    score: Scorer
    tools: tuple[Tool, ...]
    eval_tasks: Sequence[Task] | Mapping[str, Sequence[Task]] | None = None


def with_tools(environment: Environment, config: EnvironmentConfig) -> Environment:
    """`environment` with the recipe's tools. Raises UserError for a tool that is not available."""
    tools = tuple(_tool(name, config) for name in config.tools)
    return (
        ToolEnvironment(environment.tasks, environment.score, tools, getattr(environment, "eval_tasks", None))
        if tools
        else environment
    )


def _tool(name: str, config: EnvironmentConfig) -> Tool:
    if name == "calculator":
        return calculator
    if name == "python":
        return python_tool(config.sandbox)
    if name == "search":
        assert config.corpus is not None, "validated: search has a corpus"
        return search_tool(config.corpus)
    loaded = load_object("environment.tools", name, config.load_timeout_seconds)
    if not isinstance(loaded, Tool):
        raise UserError(f"environment.tools: '{name}' is {type_of(loaded)}, not a tool; put @tool before its def")
    return loaded
