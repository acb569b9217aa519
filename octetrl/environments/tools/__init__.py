"""Typed Python functions that a policy calls by name: definitions, how calls are written, and what comes back.

`tool` makes one (definition.py), a `Toolbox` answers calls whatever they are (toolbox.py), `parse_message` finds them
in what a policy wrote (parsing.py), and messages.py puts both into what chat templates take.
"""

from octetrl.environments.tools.calls import Call, Family, MalformedCall, ParsedMessage, ToolCall
from octetrl.environments.tools.definition import Tool, ToolError, tool
from octetrl.environments.tools.messages import family_of, to_message, tool_message
from octetrl.environments.tools.parsing import parse_message
from octetrl.environments.tools.toolbox import Toolbox, ToolResult

__all__ = [
    "Call",
    "Family",
    "MalformedCall",
    "ParsedMessage",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Toolbox",
    "family_of",
    "parse_message",
    "to_message",
    "tool",
    "tool_message",
]
