"""Calls are read as `renderers` reads them. It works on token ids, and we on text.
setup/outside_packages.sh runs these tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octetrl.environments.tools.formats.reading import ToolCall
from octetrl.rollout.call_text import CallText, find_format
from tests.required import missing
from tests.unit.rollout.call_templates import CALL_FAMILIES, call_tokenizer
from tests.unit.rollout.templates import tokenizer_of
from tests.unit.rollout.test_call_tokens import (
    SCHEMA,
    USER,
    calls_of,
    completion_of,
    rendered,
    to_message_calls,
)

try:
    from renderers import parsing
except ImportError as error:
    missing("verifiers", f"{error.name} is not installed; `make test-outside` runs them", whole_module=True)

_TAGS = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}
_THINK = {"think_id": "<think>", "think_end_id": "</think>"}
_GLM = {f"{name}_id": f"<{name}>" for name in ("arg_key", "arg_value")}
_GLM |= {f"{name}_end_id": f"</{name}>" for name in ("arg_key", "arg_value")}
_DEEP = ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
_KIMI = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
ORACLES: dict[str, tuple[str, dict[str, str]]] = {  # the parser, and the texts of the tokens that it asks for
    "qwen3-coder": ("parse_qwen35", _TAGS | _THINK),
    "glm": ("parse_glm", _TAGS | _THINK | _GLM),
    "deepseek-v3": ("parse_deepseek_v3", {f"tool_{name}_id": f"<｜tool▁{name.replace('_', '▁')}｜>" for name in _DEEP}),
    "kimi": ("parse_kimi_k2", {f"tool_{name}_id": f"<|tool_{name}|>" for name in _KIMI}),
    "minimax": (
        "parse_minimax",
        {"tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"} | _THINK,
    ),
    "harmony": (
        "parse_gpt_oss",
        {f"{name}_id": f"<|{name}|>" for name in ("return", "call", "start", "end", "channel", "message", "constrain")},
    ),
}  # fmt: skip


def theirs(family: str, tokens: list[int]) -> list[tuple[str | None, Any, bool]]:
    name, asked = ORACLES[family]
    tokenizer = call_tokenizer(family)
    vocabulary = tokenizer.get_vocab()
    given: dict[str, Any] = {key: vocabulary.get(text, -7) for key, text in asked.items()}
    if family != "harmony":
        given["stop_ids"] = {tokenizer.eos_token_id}
    if family in ("qwen3-coder", "glm", "minimax"):
        given["tools"] = [SCHEMA["function"]]
    found = getattr(parsing, name)(tokenizer, tokens, **given)
    return [(call.name, call.arguments, call.status == "ok") for call in found.tool_calls]


def ours(family: str, tokens: list[int]) -> list[tuple[str | None, Any, bool]]:
    tokenizer = call_tokenizer(family)
    form = find_format(tokenizer)
    assert form is not None
    text = CallText(tokenizer, form, {tokenizer.eos_token_id}).of(completion_of(family, tokens), ())
    return [
        (call.name, dict(call.arguments), True) if isinstance(call, ToolCall) else (None, None, False)
        for call in form.parse(text, [SCHEMA]).calls
    ]


def answer_of(family: str, pairs: list[dict[str, Any]]) -> list[int]:
    message = {"role": "assistant", "content": "", "tool_calls": to_message_calls(calls_of(family, pairs))}
    opened, eos = rendered(family, [USER], True), CALL_FAMILIES[family].eos
    said = rendered(family, [USER, message], False).removeprefix(opened).partition(eos)[0]
    tokens: list[int] = call_tokenizer(family).encode(said, add_special_tokens=False)
    return tokens


@pytest.mark.parametrize("family", ORACLES)
def test_whole_calls_are_the_same(family: str) -> None:
    """Of values that they read too: Qwen's template prints True, which they take for text."""
    simple: list[dict[str, Any]] = [{"a": 7, "note": "8", "parts": [1, {"x": "é"}]}, {"a": 3, "note": "x\ny"}, {}]
    for pairs in [simple, *([one] for one in simple)]:
        tokens = harmony_of(pairs[0]) if family == "harmony" else answer_of(family, pairs)
        read = ours(family, tokens)
        assert json.dumps(read) == json.dumps(theirs(family, tokens))
        assert [arguments for _, arguments, _ in read] == pairs[: 1 if family == "harmony" else None]


def harmony_of(arguments: dict[str, Any]) -> list[int]:
    """With thoughts, and the recipient in the channel: they read no recipient in the first role."""
    tokens: list[int] = call_tokenizer("harmony").encode(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add"
        f" <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>",
        add_special_tokens=False,
    )
    return tokens


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "parts": [{"x": "é"}]}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n[7]\n</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 7, "parts": [{"x": "é"}]}}'),
        ("llama3", 'So. {"name": "add", "parameters": {"a": 7}}'),  # not first: an example, not a call
    ],
)
def test_calls_in_json_are_the_same(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    ids, given = tokenizer.encode(text, add_special_tokens=False), {"stop_ids": {tokenizer.eos_token_id}}
    if family == "llama3":
        found = parsing.parse_llama_3(tokenizer, ids, **given)
    else:
        vocabulary = tokenizer.get_vocab()
        found = parsing.parse_qwen3(tokenizer, ids, **given, **{key: vocabulary[tag] for key, tag in _TAGS.items()})
    form = find_format(tokenizer)
    assert form is not None
    read = [(call.name, dict(call.arguments)) for call in form.parse(text).calls if isinstance(call, ToolCall)]
    assert read == [(call.name, call.arguments) for call in found.tool_calls if call.status == "ok"]
