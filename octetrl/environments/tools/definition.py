"""A tool is a typed Python function: the schema comes from its signature, the description from its docstring.

    @tool
    async def weather(city: str, days: Annotated[int, Field(ge=1, le=7)] = 1) -> str:
        \"\"\"The forecast for a city.

        Args:
            city: Its English name.
            days: How many, from today.
        \"\"\"

`weather.schema()` is the schema for the argument `tools=` of chat templates. `await weather.call({"city": "Oslo"})`
checks the arguments with pydantic, runs the function and returns its result as text. A function that is not async runs
in a thread, so that it does not block other calls. A thread can't be stopped, so a function that may wait long should
be async.

A function reports an error to the policy by raising ToolError(one line), as for wrong arguments. Any other exception is
a fault of the tool and is not caught.

For a method, `self` is left out of the schema, and `object.method` is a tool of that object. A tool can still be called
like the function, and can be pickled if the function can.

A `Toolbox` runs the calls of a policy. Every call gets an answer: a result, or one line that says what was wrong and
what is expected, so that the policy can correct it in its next turn.

    a call that can't be read         what is wrong with it, and the form of a call
    an unknown tool                   the nearest name, and all names
    wrong arguments                   which arguments, why, and what the tool accepts
    a ToolError of the tool           the error's text

Any other exception is a fault of the tool, which the policy cannot correct. It is not caught here. The conversation
records it as the rollout's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from octetrl.environments.tools.messages import Call, MalformedCall
from octetrl.system.errors import UserError, nearest, type_of

_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ERRORS_SHOWN = 3
_NAMES_OF_TYPES = {"integer": "whole number", "object": "JSON object", "array": "list"}


class ToolError(Exception):
    """The reason why a call has no result, in one line for the policy."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(str(text).split()))


class Tool:
    """A function that a policy can call, with its schema. `@tool` creates it. Raises UserError if the function can't be
    a tool."""

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(self.name):
            raise UserError(f"tool: '{self.name}' is not a valid name; give name= of up to 64 letters, digits and _")
        documented, documented_arguments = _read_docstring(inspect.getdoc(function) or "")
        self.description = documented if description is None else description
        self._names, self._arguments, self.parameters = _read_signature(self.name, function, documented_arguments)
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def schema(self) -> dict[str, Any]:
        """The tool's schema for chat templates and OpenAI-compatible servers."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool. Returns a text result as it is, and any other as JSON. Raises ToolError, with a line for the
        policy, for wrong arguments or if the function raises it. Other exceptions of the function are not caught."""
        values = self._checked(arguments)
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**values)
        else:
            result = await asyncio.to_thread(self.function, **values)
            if inspect.isawaitable(result):
                result = await result
        return _as_text(result)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        if instance is None or not isinstance(self.function, types.FunctionType):
            return self
        return Tool(types.MethodType(self.function, instance), name=self.name, description=self.description)

    def __repr__(self) -> str:
        return f"Tool({self.name}: {', '.join(self._names.values())})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name if the module's name refers to this tool, because it no longer refers to the function."""
        owner = getattr(self.function, "__self__", None)
        if owner is not None and isinstance(getattr(type(owner), self.function.__name__, None), Tool):
            return (getattr, (owner, self.function.__name__))
        qualified: str = getattr(self.function, "__qualname__", "")
        with contextlib.suppress(KeyError, AttributeError):
            if attrgetter(qualified)(sys.modules[self.__module__]) is self:
                return qualified
        return partial(Tool, self.function, name=self.name, description=self.description), ()

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(self._complaint(error)) from None
        return {name: getattr(checked, field) for field, name in self._names.items()}

    def _complaint(self, error: ValidationError) -> str:
        """One line: which argument is wrong, why, and what the tool accepts."""
        problems = []
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            where = ".".join(str(step) for step in each["loc"])
            if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
                problems.append(f"there is no argument '{where}'{nearest(where, self._names.values())}")
            else:
                problems.append(f"'{where}': {each['msg']}")
        more = f" and {len(problems) - _ERRORS_SHOWN} more" if len(problems) > _ERRORS_SHOWN else ""
        return f"{self.name}: {sentence('; '.join(problems[:_ERRORS_SHOWN]) + more)} {self._takes()}"

    def _takes(self) -> str:
        required = self.parameters.get("required", [])
        each = [
            f"{name} ({_type_word(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.parameters["properties"].items()
        ]
        return f"It takes {', '.join(each)}" if each else "It takes no arguments"


def tool(function: Callable[..., Any]) -> Tool:
    """Decorator: the function as a tool."""
    return Tool(function)


def sentence(text: str) -> str:
    """`text` with a full stop at its end, if it has none."""
    return text if text.endswith(("?", ".")) else f"{text}."


def _read_signature(
    tool_name: str, function: Callable[..., Any], documented_arguments: Mapping[str, str]
) -> tuple[dict[str, str], type[BaseModel], dict[str, Any]]:
    """Returns field name -> parameter name, the pydantic model of the arguments, and its schema. Fields have generated
    names, because some names, such as `copy`, are not possible in a model."""
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(target, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool '{tool_name}': its types can't be read ({error}); import what they name") from error
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if place == 0 and parameter.name == "self" and "self" not in hints:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool '{tool_name}': '{parameter}' can't be given by name; use named parameters alone")
        if parameter.name not in hints:
            raise UserError(f"tool '{tool_name}': parameter '{parameter.name}' has no type; give one, as in 'x: int'")
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        names[f"a{place}"] = parameter.name
        field = Field(default, alias=parameter.name, description=documented_arguments.get(parameter.name))
        fields[f"a{place}"] = (hints[parameter.name], field)
    try:
        model = create_model(tool_name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
        schema: dict[str, Any] = _without_titles(model.model_json_schema())
    except (PydanticUserError, TypeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise UserError(f"tool '{tool_name}': {reason}; use types that JSON can give") from error
    for key in ("additionalProperties", "description"):  # nobody reads them, and they cost tokens in each prompt
        schema.pop(key, None)
    return names, model, {"type": "object", "properties": {}, **schema}


def _without_titles(schema: Any) -> Any:
    """Remove pydantic's titles: they repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            kept[key] = {name: _without_titles(each) for name, each in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            kept[key] = value
        elif key != "title":
            kept[key] = _without_titles(value)
    return kept


def _type_word(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_word(each) for each in schema["anyOf"])
    kind = str(schema.get("type", "JSON object"))
    return _NAMES_OF_TYPES.get(kind, kind)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return to_json(result).decode()
    except PydanticSerializationError:
        return str(result)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the text of each parameter in `Args:`."""
    described: list[str] = []
    arguments: dict[str, str] = {}
    section: Literal["", "arguments", "other"] = ""
    name, indent = "", 0
    for line in text.splitlines():
        heading = _SECTION.fullmatch(line)
        if heading:
            section = "arguments" if heading[1] in ("Args", "Arguments", "Parameters") else "other"
            name, indent = "", 0
        elif not section:
            described.append(line)
        elif section == "arguments" and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = re.fullmatch(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line)
            if entry and depth == indent:
                name = entry[1]
                arguments[name] = entry[2].strip()
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(described).strip(), arguments


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
