"""Tools: Python functions with type annotations that a policy calls by name.

`tool` turns a function into a tool, and a `Toolbox` runs calls, also malformed ones (definition.py). `parse_message`
finds calls in a policy's message, and messages.py converts calls and results to the messages of chat templates.
"""

from octetrl.environments.tools.definition import Tool, Toolbox, ToolError, ToolResult, tool
from octetrl.environments.tools.messages import (
    Call,
    Family,
    MalformedCall,
    ParsedMessage,
    ToolCall,
    family_of,
    json_arguments,
    parse_message,
    to_message,
    tool_message,
    with_read_calls,
)

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
    "json_arguments",
    "parse_message",
    "to_message",
    "tool",
    "tool_message",
    "with_read_calls",
]
