"""The tools that a policy may call, and what a call comes to.

Whatever a policy writes, it is answered: a result, or one line that says what was wrong and what is expected, which it
may act on in its next turn.

    a call that can't be read         what is wrong with it, and the form of a call
    a name that no tool has           the nearest one, and all of them
    arguments that don't suit         which, why, and what the tool takes
    what the tool refuses             its own line (ToolError)

Any other exception is a fault of the tool, which the policy cannot correct. It is not caught here. The conversation
records it as the rollout's status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octetrl.config.errors import UserError, nearest
from octetrl.environments.tools.calls import Call, MalformedCall
from octetrl.environments.tools.definition import Tool, ToolError, sentence


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str  # for the policy
    refused: bool = False  # the call came to nothing, and `text` says why


class Toolbox:
    """Tools by name. Raises UserError where two have one name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.tools: dict[str, Tool] = {}
        for each in tools:
            if not isinstance(each, Tool):
                raise UserError(f"tools: {each!r} is a {type(each).__name__}, not a tool; put @tool before its def")
            if each.name in self.tools:
                raise UserError(f"tools: two are called '{each.name}'; rename one")
            self.tools[each.name] = each

    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template takes in `tools=`."""
        return [each.schema() for each in self.tools.values()]

    async def answer(self, call: Call) -> ToolResult:
        """What `call` comes to. Raises what the tool raised, unless that is a ToolError."""
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
