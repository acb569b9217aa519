"""A tool is a typed Python function: the schema comes from its signature, the description from its docstring.

    @tool
    async def weather(city: str, days: Annotated[int, Field(ge=1, le=7)] = 1) -> str:
        \"\"\"The forecast for a city.

        Args:
            city: Its English name.
            days: How many, from today.
        \"\"\"

`weather.schema()` is what chat templates take in `tools=`; `await weather.call({"city": "Oslo"})` checks the arguments
with pydantic, runs the function and gives its result as text. A function that is not async runs in a thread, so that
one that waits holds up nobody else; a thread can't be stopped, though, so what may wait long should be async.

A function says what went wrong by raising ToolError(one line), which is for the policy to read and act on, as wrong
arguments are. Whatever else it raises is a fault of the tool and passes through.

On a method, `self` is left out of the schema and `object.method` is a tool of that object. A tool is still callable as
the function that it was, and can be pickled where that could.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from octetrl.config.errors import UserError, nearest

_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ERRORS_TOLD = 3
_NAMES_OF_TYPES = {"integer": "whole number", "object": "JSON object", "array": "list"}


class ToolError(Exception):
    """What a call came to instead of a result, in one line for the policy."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(str(text).split()))


class Tool:
    """A function with what a policy needs to call it; made by `@tool`. Raises UserError for one that can't be."""

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(self.name):
            raise UserError(f"tool: '{self.name}' is no name for one; give name= of up to 64 letters, digits and _")
        documented, documented_arguments = _read_docstring(inspect.getdoc(function) or "")
        self.description = documented if description is None else description
        self._names, self._arguments = _arguments_model(self.name, function, documented_arguments)
        self.parameters: dict[str, Any] = _schema_of(self.name, self._arguments)
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible servers take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text: a string as it is, anything else as JSON. Raises ToolError, whose line is for the policy,
        for wrong arguments and what the function refuses; any other exception is the function's own."""
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
        """By name where the decorated function's name leads here, since it no longer leads to the function."""
        owner = getattr(self.function, "__self__", None)
        if owner is not None and isinstance(getattr(type(owner), self.function.__name__, None), Tool):
            return (getattr, (owner, self.function.__name__))
        qualified = getattr(self.function, "__qualname__", "")
        if _found(self.__module__, qualified) is self:
            return qualified
        return (_from_parts, (self.function, self.name, self.description))

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(self._complaint(error)) from None
        return {name: getattr(checked, field) for field, name in self._names.items()}

    def _complaint(self, error: ValidationError) -> str:
        """One line: what is wrong with which argument, and what the tool takes."""
        problems = []
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            where = ".".join(str(step) for step in each["loc"])
            if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
                problems.append(f"there is no argument '{where}'{nearest(where, self._names.values())}")
            else:
                problems.append(f"'{where}': {each['msg']}")
        more = f" and {len(problems) - _ERRORS_TOLD} more" if len(problems) > _ERRORS_TOLD else ""
        return f"{self.name}: {sentence('; '.join(problems[:_ERRORS_TOLD]) + more)} {self._takes()}"

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
    """`text` with the stop that ends it, if it has none."""
    return text if text.endswith(("?", ".")) else f"{text}."


def _from_parts(function: Callable[..., Any], name: str, description: str) -> Tool:
    return Tool(function, name=name, description=description)


def _found(module: str, qualified: str) -> object:
    try:
        return reduce(getattr, qualified.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _arguments_model(
    tool_name: str, function: Callable[..., Any], documented_arguments: Mapping[str, str]
) -> tuple[dict[str, str], type[BaseModel]]:
    """Field -> parameter, and the model. Fields have names of ours, for a model has no room for one called `copy`."""
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
    except (PydanticUserError, TypeError) as error:
        raise UserError(f"tool '{tool_name}': {_first_line(error)}; use types that JSON can give") from error
    return names, model


def _schema_of(tool_name: str, model: type[BaseModel]) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = _without_titles(model.model_json_schema())
    except PydanticUserError as error:
        raise UserError(f"tool '{tool_name}': {_first_line(error)}; use types that JSON can give") from error
    schema.pop("additionalProperties", None)  # said to everybody, read by nobody, and costs tokens in each prompt
    schema.pop("description", None)
    return {"type": "object", "properties": {}, **schema}


def _without_titles(schema: Any) -> Any:
    """Pydantic titles everything; a policy reads the name beside it."""
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
    """What comes before the first section, and from `Args:` the text of each parameter."""
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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
