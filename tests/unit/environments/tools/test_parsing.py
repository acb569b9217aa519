"""What a template writes is read back, whatever the arguments hold; arbitrary text is never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octetrl.environments.tools.formats import FORMATS, format_of
from octetrl.environments.tools.formats.reading import MalformedCall, ParsedMessage, ToolCall
from octetrl.environments.tools.messages import to_message, tool_message
from octetrl.run.tiny_model import CHAT_TEMPLATE
from tests.unit.environments.tools.templates import HERMES, LLAMA3, render, said

TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA3}
FAMILIES = ["hermes", "llama3_json"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", '{"name": "f", ', '"parameters": {']
MARKS += ['"arguments": {"a": 1}', "}", "{", "[", '"', "; ", "\n", "1e999", "NaN", "\\ud800", "\\", "text "]
unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
marked = st.lists(st.sampled_from(MARKS) | unicode, max_size=12).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | marked,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(unicode, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(marked, values, max_size=4)
calls = st.lists(st.tuples(st.from_regex(r"[A-Za-z_]\w{0,20}", fullmatch=True), arguments), min_size=1, max_size=3)
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30).map(str.strip)


def parse_message(text: str, family: str) -> ParsedMessage:
    return FORMATS[family].parse(text)


def numbered(pairs: list[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{index}", *pair) for index, pair in enumerate(pairs))


@given(content=plain, pairs=calls)
def test_hermes_calls_are_read_as_they_were_written(content: str, pairs: list[Any]) -> None:
    message = ParsedMessage(content, numbered(pairs))
    assert parse_message(said(HERMES, to_message(message)), "hermes") == message


@given(content=plain, thought=plain, pairs=calls)
def test_hermes_calls_after_thoughts_are_read(content: str, thought: str, pairs: list[Any]) -> None:
    message = ParsedMessage(f"<think>\n<tool_call>{thought}\n</think>\n{content}".strip(), numbered(pairs))
    assert parse_message(said(HERMES, to_message(message)), "hermes") == message


@given(pairs=calls)
def test_llama_calls_are_read_as_they_were_written(pairs: list[Any]) -> None:
    message = ParsedMessage("", numbered(pairs))
    text = said(LLAMA3, to_message(message))
    assert parse_message(text, "llama3_json") == message
    assert parse_message(f"<|python_tag|>{text}", "llama3_json") == message


@pytest.mark.parametrize("family", FAMILIES)
@given(text=marked)
@example("<tool_call>" + "[" * 100_000)
@example('<|python_tag|>{"name":' + "9" * 5_000)
@example('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}')
def test_arbitrary_text_is_content_or_a_call_or_told_to_be_malformed(family: str, text: str) -> None:
    parsed = parse_message(text, family)
    assert parsed.calls or parsed.content == text.strip()
    render(TEMPLATES[family], [to_message(parsed)]).encode()
    for call in parsed.calls:
        if isinstance(call, MalformedCall):
            assert call.text in text and "\n" not in call.error and '"name": <tool name>' in call.error


F = ToolCall("call_0", "f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('Well, <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> so.', ParsedMessage("Well,\nso.", (F,))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n', ParsedMessage("", (F,))),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ParsedMessage("", (F,))),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ParsedMessage("", (F,))),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
            ParsedMessage("", (ToolCall("call_0", "f", {"a": "x\ny"}),)),
        ),
        (
            'of <tool_call>\n</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            ParsedMessage("of <tool_call>\n</think>", (F,)),
        ),
        (
            '<think>a</think> <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> so</think> then',
            ParsedMessage("<think>a</think>\nso</think> then", (F,)),
        ),
        ("<think> still <tool_call>{}</tool_call>", ParsedMessage("<think> still <tool_call>{}</tool_call>")),
    ],
)
def test_hermes_cases(text: str, parsed: ParsedMessage) -> None:
    assert parse_message(text, "hermes") == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('Now <|python_tag|>{"name": "f", "parameters": {"a": 1}}', ParsedMessage("Now", (F,))),
        ('{"name": "f", "arguments": {"a": 1}} then', ParsedMessage("then", (F,))),
        ('<think>{</think>\n{"name": "f", "parameters": {"a": 1}}', ParsedMessage("<think>{</think>", (F,))),
        ('{"answer": 3}', ParsedMessage('{"answer": 3}')),
        ("{1, 2} is the set", ParsedMessage("{1, 2} is the set")),
        ('As {"name": "f", "parameters": {}}', ParsedMessage('As {"name": "f", "parameters": {}}')),
    ],
)
def test_llama_cases(text: str, parsed: ParsedMessage) -> None:
    assert parse_message(text, "llama3_json") == parsed


@pytest.mark.parametrize(
    ("text", "family", "said"),
    [
        ("<tool_call>{name: 'f'}</tool_call>", "hermes", "not JSON (Expecting property name"),
        ("<tool_call></tool_call>", "hermes", "not JSON (Expecting value at '</tool_call>')"),
        ("<tool_call>[1]</tool_call>", "hermes", "it is a list, not an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "hermes", 'it has no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "hermes", '"name" is a number, not the name'),
        ('<tool_call>{"name": "f"}</tool_call>', "hermes", 'it has no "arguments"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "hermes", '"arguments" is a list, not an object'),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "hermes", "NaN is not JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}} go', "hermes", "'} go' stands where </tool_call> should"),
        ('{"name": f}', "llama3_json", "not JSON (Expecting value at 'f}')"),
        ('<|python_tag|>{"name": "f"}', "llama3_json", 'it has no "parameters"'),
    ],
)
def test_what_is_wrong_is_told_with_what_is_expected(text: str, family: str, said: str) -> None:
    parsed = parse_message(text, family)
    (call,) = parsed.calls
    assert isinstance(call, MalformedCall)
    assert said in call.error and '{"name": <tool name>' in call.error
    assert parsed.content == ""
    assert tool_message(call, call.error) == {"role": "tool", "content": call.error}
    assert to_message(parsed)["content"] == call.text


def test_a_malformed_call_does_not_hide_its_neighbours() -> None:
    text = 'a <tool_call>{oops <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> <tool_call>x</tool_call> b'
    parsed = parse_message(text, "hermes")
    assert parsed.content == "a\nb"
    assert [type(call) for call in parsed.calls] == [MalformedCall, ToolCall, MalformedCall]
    assert [call.text for call in parsed.calls if isinstance(call, MalformedCall)] == [
        "<tool_call>{oops",
        "<tool_call>x</tool_call>",
    ]


def test_the_family_is_told_from_the_template() -> None:
    assert [format_of(HERMES), format_of(LLAMA3)] == [FORMATS["hermes"], FORMATS["llama3_json"]]
    assert format_of(CHAT_TEMPLATE) is None
    assert format_of(HERMES + "<function=name>") == FORMATS["qwen3_coder"]  # another way inside the same tags
