"""Runs the calls of a policy.

Every call gets an answer: a result, or one line that says what was wrong and what is expected, so that the policy can
correct it in its next turn.

    a call that can't be read         what is wrong with it, and the form of a call
    an unknown tool                   the nearest name, and all names
    wrong arguments                   which arguments, why, and what the tool accepts
    a ToolError of the tool           the error's text

Any other exception is a fault of the tool, which the policy cannot correct. It is not caught here. The conversation
records it as the rollout's status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octetrl.environments.tools.calls import Call, MalformedCall
from octetrl.environments.tools.definition import Tool, ToolError, sentence
from octetrl.system.errors import UserError, nearest, type_of


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str  # for the policy
    refused: bool = False  # the call has no result, and `text` says why


class Toolbox:
    """Tools by name. Raises UserError if two have the same name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.tools: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(each, Tool):
                raise UserError(f"tools: {each!r} is {type_of(each)}, not a tool; put @tool before its def")
            if each.name in self.tools:
                raise UserError(f"tools: two are called '{each.name}'; rename one")
            self.tools[each.name] = each

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas for the chat template's argument `tools=`."""
        return [each.schema() for each in self.tools.values()]

    async def answer(self, call: Call) -> ToolResult:
        """Run `call` and return its answer. Exceptions of the tool are not caught, except ToolError."""
        if isinstance(call, MalformedCall):
            return ToolResult(f"Error: {call.error}", refused=True)
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            text = sentence(f"there is no tool '{call.name}'{nearest(call.name, self.tools)}")
            return ToolResult(f"Error: {text} The tools are: {known}", refused=True)
        try:
            return ToolResult(await self.tools[call.name].call(call.arguments))
        except ToolError as error:
            return ToolResult(f"Error: {error}", refused=True)
