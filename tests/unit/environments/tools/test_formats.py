"""Formats of tool calls besides Hermes and Llama 3 (test_parsing.py): faults are reported, and no text raises."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.schema import ToolFormatName
from octetrl.environments.tools.formats import FORMATS, RESPONSE_TEMPLATE, by_tokenizer, format_of
from octetrl.environments.tools.formats.reading import MalformedCall, ParsedMessage, ToolCall, ToolFormat, typed
from octetrl.environments.tools.messages import to_message
from octetrl.rollout.call_text import find_format
from tests.unit.rollout.call_templates import CALL_FAMILIES
from tests.unit.rollout.templates import tokenizer_of

DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
MINIMAX = '<minimax:tool_call><invoke name="f"><parameter name="a">'
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
EVERYWHERE = ["<think>", "</think>", "\n", " ", "f", '{"a": 1}', "{", '"a": 1}', "[", "]", "1e999", "é", "function"]
RESPONSE = {
    "start_anchor": "assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        "content": {"close": "<|im_end|>"},
    },
}


def marks_of(form: ToolFormat) -> list[str]:
    marks = [*(form.marks or ["<call>", "</call>"]), *filter(None, form.openings), *form.ends]
    tags = ["<function=f>", "</function>", "<parameter=a>", "</parameter>", '<invoke name="f">', "</invoke>"]
    return [*marks, *tags, '<parameter name="a">', "functions.f:0", " to=functions.f", "```json\n", "[CALL_ID]"]


def response_format() -> ToolFormat:
    tokenizer = tokenizer_of("chatml")
    tokenizer.response_template = RESPONSE
    try:
        found = find_format(tokenizer)
        assert found is not None and found.name == RESPONSE_TEMPLATE
        return found
    finally:
        del tokenizer.response_template


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize(
    "form", [*FORMATS.values(), by_tokenizer(tokenizer_of("chatml"), "")], ids=lambda one: one.name
)
def test_no_text_raises_and_what_is_malformed_says_why(form: ToolFormat, data: st.DataObject) -> None:
    piece = st.sampled_from([*EVERYWHERE, *marks_of(form)]) | st.text(
        st.characters(exclude_categories=["Cs"]), max_size=4
    )
    text = "".join(data.draw(st.lists(piece, max_size=14)))
    parsed = form.parse(text, TOOLS)
    json.dumps(to_message(parsed), allow_nan=False).encode()
    ids = [call.id for call in parsed.calls if isinstance(call, ToolCall)]
    assert len(set(ids)) == len(ids)
    for call in parsed.calls:
        if isinstance(call, MalformedCall):
            assert call.text in text and "\n" not in call.error and call.error.endswith(form.form)
        else:
            assert call.name


F = ToolCall("call_0", "f", {"a": 1})


@pytest.mark.parametrize(
    ("name", "text", "parsed"),
    [
        ("qwen3_coder", "so <function=f><parameter=a>1</parameter></function> go", ParsedMessage("so\ngo", (F,))),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n<function=g>\n</function></tool_call>",
            ParsedMessage("", (F, ToolCall("call_1", "g", {}))),
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", ParsedMessage("", (F,))),
        ("minimax_m2", f"{MINIMAX}1</parameter></minimax:tool_call>", ParsedMessage("", (F,))),
        (
            "glm45",
            "<think>x</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
            ParsedMessage("<think>x</think>", (F,)),
        ),
        ("deepseek_v3", f"{DEEP}f<｜tool▁sep｜>" + '{"a": 1}<｜tool▁call▁end｜> b', ParsedMessage("b", (F,))),
        (
            "deepseek_v3",
            "x</think><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n" + '{"a": 1}',
            ParsedMessage("x</think>", (F,)),
        ),
        (
            "kimi_k2",
            f"{KIMI}f:7<|tool_call_argument_begin|>" + '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            ParsedMessage("", (ToolCall("f:7", "f", {"a": 1}),)),
        ),
        (
            "mistral",
            "[TOOL_CALLS] "
            + json.dumps([{"name": "f", "arguments": {}, "id": id} for id in ("call00001", "call00001")]),
            ParsedMessage("", (ToolCall("call00001", "f", {}), ToolCall("call00002", "f", {}))),
        ),
        ("minimax_m2", 'see <invoke name="f">', ParsedMessage('see <invoke name="f">')),
        ("mistral", '[TOOL_CALLS]f{"a": 1} b', ParsedMessage("b", (ToolCall("call00000", "f", {"a": 1}),))),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": 1}", "id": "abcdefghi"}, '
            '{"name": "g", "arguments": {}}]',
            ParsedMessage("", (ToolCall("abcdefghi", "f", {"a": 1}), ToolCall("call00001", "g", {}))),
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]x[ARGS]{"a": 1}',
            ParsedMessage("", (ToolCall("call00000", "f", {"a": 1}),)),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            ' <|constrain|>json<|message|>{"a": 1}<|call|>',
            ParsedMessage("<think>\nhm\n</think>", (F,)),
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>now<|end|><|start|>assistant<|channel|>final<|message|>7",
            ParsedMessage("now\n7"),
        ),
        ("harmony", "plain", ParsedMessage("plain")),
    ],
)
def test_other_ways_that_models_write(name: str, text: str, parsed: ParsedMessage) -> None:
    assert FORMATS[name].parse(text, TOOLS) == parsed


@pytest.mark.parametrize(
    ("name", "text", "before"),
    [
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "'add(1)</tool_call>' stands where <function= should"),
        ("qwen3_coder", "<function=f><parameter=a>1</function>", "the value of 'a' does not end"),
        ("qwen3_coder", "<function=f>1</function>", "'1</function>' stands where </function> should"),
        ("glm45", "<tool_call></tool_call>", "it has no name of a tool"),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', "it has no name of a tool"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></tool_call>", "'<arg_key>a</arg_key></tool_call>' stands where"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "its end stands where"),
        ("deepseek_v3", f"{DEEP}f<｜tool▁call▁end｜>", "it has no <｜tool▁sep｜>"),
        ("deepseek_v3", f"{DEEP}f<｜tool▁sep｜>[1]", "it has no name of a tool"),
        ("kimi_k2", f"{KIMI}functions.f:0", "it has no <|tool_call_argument_begin|>"),
        ("kimi_k2", f"{KIMI}f g<|tool_call_argument_begin|>{{}}", "'f g' is no functions.NAME:INDEX"),
        ("minimax_m2", "<minimax:tool_call>f</minimax:tool_call>", "'f</minimax:tool_call>' stands where"),
        ("mistral", "[TOOL_CALLS]", "it is empty"),
        ("mistral", "[TOOL_CALLS] []", "the list is empty"),
        ("mistral", "[TOOL_CALLS]f(1)", "'f(1)' is no name of a tool with [ARGS] behind it"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "its arguments are a list, not an object"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "it is not JSON"),
        ("harmony", "<|channel|>commentary to=functions.f json{}", "it has no <|message|>"),
        ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "it has no name of a tool"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_expected(name: str, text: str, before: str) -> None:
    form = FORMATS[name]
    parsed = form.parse(text, TOOLS)
    (call,) = parsed.calls
    assert isinstance(call, MalformedCall)
    assert (before in call.error, call.error.endswith(form.form), text.startswith(call.text)) == (True, True, True)
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {}, 7),
        ("seven", {"type": "integer"}, "seven"),
        ("7.0", {"type": "number"}, 7.0),
        ("7.0", {"type": "integer"}, 7.0),
        ("7.5", {"type": "integer"}, "7.5"),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"type": ["string", "null"]}, "7"),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("{}", {"$ref": "#/$defs/x"}, {}),
        ('"7"', {"type": "array"}, '"7"'),
        (" a ", None, " a "),
        ("1e999", {"type": "number"}, "1e999"),
    ],
)
def test_the_schema_types_a_value(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "draft", "call"),
    [
        ("qwen3_coder", "<function=f><parameter=a> or", "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", "f\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="a">',
            '<invoke name="f"><parameter name="a">7</parameter></invoke>',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '{"name": "f", "arguments": {"a": 7}}'),
    ],
)
@pytest.mark.parametrize("opened_by_the_prompt", [True, False])
def test_a_draft_in_the_thoughts_takes_no_call_with_it(
    name: str, draft: str, call: str, opened_by_the_prompt: bool
) -> None:
    opening, closing = (
        ("<minimax:tool_call>", "</minimax:tool_call>") if name == "minimax_m2" else ("<tool_call>", "</tool_call>")
    )
    draft = opening + draft.removeprefix(opening)
    thoughts = f"{'' if opened_by_the_prompt else '<think>'}I could {draft}\n</think>"
    parsed = FORMATS[name].parse(f"{thoughts}\n\n{opening}{call}{closing}", TOOLS)
    assert [call.arguments for call in parsed.calls if isinstance(call, ToolCall)] == [{"a": 7}] and len(
        parsed.calls
    ) == 1
    assert parsed.content == thoughts


@pytest.mark.parametrize("said", ["</think>", "a </think> b", "x</think>\n</think>"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("glm45", "<tool_call>f<arg_key>t</arg_key><arg_value>{}</arg_value></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=t>\n{}\n</parameter>\n</function>\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f"><parameter name="t">{}</parameter></invoke></minimax:tool_call>',
        ),
    ],
)
def test_an_argument_may_hold_the_end_of_thoughts(name: str, call: str, said: str) -> None:
    for before in ("", "Hm. ", "hm</think>", "<think>hm</think>"):
        message = FORMATS[name].parse(f"{before}{call.format(said)}\n{call.format('x')}")
        assert [dict(one.arguments) for one in message.calls if isinstance(one, ToolCall)] == [{"t": said}, {"t": "x"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=g>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>"),
        (
            "minimax_m2",
            MINIMAX.replace('"f"', '"g"') + '1<parameter name="b">2</parameter></invoke></minimax:tool_call>',
        ),
        ("glm45", "<tool_call>g<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>"),
    ],
)
def test_a_value_without_an_end_does_not_take_the_next_parameter(name: str, text: str) -> None:
    """If the tool has that parameter; else it may be text of the value."""
    for parameters, read in (("ab", {"a": "1", "b": "2"}), ("a", None)):
        properties = {each: {"type": "string"} for each in parameters}
        (call,) = (
            FORMATS[name].parse(text, [{"function": {"name": "g", "parameters": {"properties": properties}}}]).calls
        )
        assert isinstance(call, ToolCall)
        assert call.arguments == read or (read is None and "b" not in call.arguments and "2" in call.arguments["a"])


def test_a_name_does_not_run_on_into_the_next_call() -> None:
    text = f"{DEEP}f<｜tool▁spe｜>{{}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    wrong, right = FORMATS["deepseek_v3"].parse(text).calls
    assert isinstance(wrong, MalformedCall) and isinstance(right, ToolCall) and right.name == "f"


def test_many_calls_take_no_long_time() -> None:
    text = f"{KIMI}{'functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>' * 20_000}"
    began = time.process_time()
    calls = FORMATS["kimi_k2"].parse(text).calls
    assert time.process_time() - began < 5 and len({one.id for one in calls if isinstance(one, ToolCall)}) == 20_000


def test_every_template_has_its_format() -> None:
    assert {family: format_of(one.template) for family, one in CALL_FAMILIES.items()} == {
        family: FORMATS[one.form] for family, one in CALL_FAMILIES.items()
    }
    assert set(get_args(ToolFormatName)) == {"auto", *FORMATS, RESPONSE_TEMPLATE}


def test_an_unknown_template_is_read_by_the_tokenizers_own_response_template() -> None:
    form = response_format()
    tokenizer = tokenizer_of("chatml")
    tokenizer.response_template = RESPONSE
    try:
        text = '<think>a</think>so <call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</call>'
        assert form.parse(text) == ParsedMessage("<think>\na\n</think>\nso", (F,))
        assert form.parse("so") == ParsedMessage("so")
        for broken in ("<call>{oops</call>", "<call>[1]</call>", '<call>{"function": {"name": 3}}</call>'):
            (call,) = form.parse(broken).calls
            assert isinstance(call, MalformedCall)
    finally:
        del tokenizer.response_template


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda one: one.name)
def test_a_long_text_takes_no_long_time(form: ToolFormat) -> None:
    begun = time.process_time()
    beginnings = [*marks_of(form), "<tool_call>f<arg_key>a", "<function=f><parameter=a", "[TOOL_CALLS]f", "<think>"]
    for beginning in beginnings:
        for more in (" " * 20_000, "f" * 20_000, beginning * 1_000):
            form.parse(f"{beginning}{more}", TOOLS)
    assert time.process_time() - begun < 20  # a cubic pattern takes hours
