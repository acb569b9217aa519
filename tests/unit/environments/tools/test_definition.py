"""A typed function as a tool: its schema, how it is called, and what is said of wrong calls."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from octetrl.environments.tools.definition import Tool, Toolbox, ToolError, ToolResult, tool
from octetrl.environments.tools.messages import MalformedCall, ToolCall
from octetrl.system.errors import UserError


class Place(BaseModel):
    title: str
    height: int = 0


@tool
async def forecast(
    city: str, days: Annotated[int, Field(ge=1, le=7)] = 1, unit: Literal["C", "F"] = "C", copy: Place | None = None
) -> str:
    """The forecast for a city.

    Nothing else.

    Args:
        city (str): Its English
            name.
        days: How many: from today.

    Returns:
        days: not a parameter here.
    """
    return f"{city} {days} {unit} {copy and copy.title}"


@tool
def divide(a: float, b: float) -> float:
    """A quotient."""
    if b == 0:
        raise ToolError("divide: b is 0,\n and nothing can be divided by it")
    return a / b


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    @tool
    def add(self, n: int) -> dict[str, int]:
        """Count on."""
        self.count += n
        return {"count": self.count}


def called(tool: Tool, **arguments: Any) -> str:
    return asyncio.run(tool.call(arguments))


def answered(call: ToolCall | MalformedCall, *tools: Tool) -> ToolResult:
    return asyncio.run(Toolbox(tools).answer(call))


def test_the_schema_comes_from_signature_and_docstring() -> None:
    function = forecast.schema()["function"]
    assert function["name"] == "forecast" and function["description"] == "The forecast for a city.\n\nNothing else."
    properties = function["parameters"]["properties"]
    assert properties["city"] == {"type": "string", "description": "Its English name."}
    assert properties["days"] == {
        "type": "integer",
        "description": "How many: from today.",
        "default": 1,
        "minimum": 1,
        "maximum": 7,
    }
    assert properties["unit"]["enum"] == ["C", "F"] and "description" not in properties["unit"]
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["$defs"]["Place"]["properties"]["title"] == {"type": "string"}


def test_arguments_are_checked_and_results_are_text() -> None:
    assert called(forecast, city="Oslo", days="3", copy={"title": "Hill"}) == "Oslo 3 C Hill"
    assert called(divide, a=1, b=4) == "0.25"
    assert called(Counter(3).add, n=2) == '{"count":5}'
    assert divide(1.0, 4.0) == 0.25
    assert called(tool(nothing)) == "null"
    assert called(tool(in_main_thread)) == "false"  # a function that is not async runs beside the loop


def nothing() -> None:
    """Do nothing."""


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("0", "forecast", {"city": "Oslo", "days": 9}), "'days': Input should be less than or equal to 7"),
        (
            ToolCall("0", "forecast", {"cty": "Oslo"}),
            "did you mean 'city'? It takes city (string), days (whole number, optional), unit (one",
        ),
        (ToolCall("0", "divide", {"p": 1, "q": 2, "r": 3}), "and 2 more"),
        (ToolCall("0", "forecast", {"city": "O", "copy": {"height": 1}}), "'copy.title': Field required"),
        (ToolCall("0", "divide", {"a": 1, "b": 0}), "Error: divide: b is 0, and nothing can be divided by it"),
        (
            ToolCall("0", "divde", {}),
            "there is no tool 'divde'; did you mean 'divide'? The tools are: forecast, divide",
        ),
        (ToolCall("0", "zzz", {}), "there is no tool 'zzz'. The tools are"),
        (MalformedCall("{", "it is not JSON"), "Error: it is not JSON"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(call: ToolCall | MalformedCall, said: str) -> None:
    result = answered(call, forecast, divide)
    assert result.refused and said in result.text
    assert "\n" not in result.text and "pydantic" not in result.text


def test_a_fault_of_the_tool_is_not_the_policys() -> None:
    @tool
    def broken(x: int) -> int:
        """Raise."""
        raise KeyError("oops")

    with pytest.raises(KeyError, match="oops"):
        answered(ToolCall("0", "broken", {"x": 1}), broken)


def test_tools_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(forecast)) is forecast
    counter: Tool = pickle.loads(pickle.dumps(Counter(3).add))
    assert called(counter, n=1) == '{"count":4}'
    renamed = pickle.loads(pickle.dumps(Tool(nothing, name="idle", description="Idle.")))
    assert (renamed.name, renamed.description, called(renamed)) == ("idle", "Idle.", "null")


def untyped(x) -> int:  # type: ignore[no-untyped-def]
    return 0


def starred(*xs: int) -> int:
    return 0


def odd(x: threading.Lock) -> int:
    return 0


def unknown(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "parameter 'x' has no type"),
        (starred, "can't be given by name"),
        (odd, "use types that JSON can give"),
        (unknown, "name 'Nowhere' is not defined"),
        (lambda: 0, "'<lambda>' is not a valid name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_in_one_line(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        tool(function)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_toolbox_refuses_two_of_one_name_and_what_is_no_tool() -> None:
    with pytest.raises(UserError, match="two are called 'divide'"):
        Toolbox([divide, divide])
    with pytest.raises(UserError, match="put @tool before its def"):
        Toolbox([nothing])  # type: ignore[list-item]
