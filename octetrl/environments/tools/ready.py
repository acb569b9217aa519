"""Tools that a recipe names, and an environment that lets the policy call them before it answers.

    environment: {kind: math, dataset: gsm8k.jsonl, tools: [calculator, python]}

The tasks and the score do not change. The last message, which has no call, is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.python_object import load_object
from octetrl.environments.scoring import Scorer
from octetrl.environments.tasks import Environment
from octetrl.environments.tools.calculator import calculator
from octetrl.environments.tools.definition import Tool
from octetrl.environments.tools.python import python_tool
from octetrl.environments.tools.search import search_tool
from octetrl.records import Task
from octetrl.system.errors import UserError, type_of


@dataclass(frozen=True)
class ToolEnvironment:
    """Tasks and a score, with tools that the policy may call before it answers."""

    tasks: Sequence[Task]
    score: Scorer
    tools: tuple[Tool, ...]


def with_tools(environment: Environment, config: EnvironmentConfig) -> Environment:
    """`environment` with the recipe's tools. Raises UserError for a tool that is not available."""
    tools = tuple(_tool(name, config) for name in config.tools)
    return ToolEnvironment(environment.tasks, environment.score, tools) if tools else environment


def _tool(name: str, config: EnvironmentConfig) -> Tool:
    if name == "calculator":
        return calculator
    if name == "python":
        return python_tool(config.sandbox)
    if name == "search":
        assert config.corpus is not None, "validated: search has a corpus"
        return search_tool(config.corpus)
    found = load_object("environment.tools", name, config.load_timeout_seconds)
    if not isinstance(found, Tool):
        raise UserError(f"environment.tools: '{name}' is {type_of(found)}, not a tool; put @tool before its def")
    return found
