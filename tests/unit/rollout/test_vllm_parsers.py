"""Calls are read as vLLM's parsers read them, from whole answers without thoughts, which vLLM removes before.
setup/outside_packages.sh runs these tests."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from octetrl.environments.tools.formats import FORMATS
from octetrl.environments.tools.formats.reading import ToolCall
from tests.required import missing
from tests.unit.rollout.call_templates import CALL_FAMILIES, call_tokenizer
from tests.unit.rollout.test_call_tokens import SCHEMA, USER, calls_of, rendered, to_message_calls
from tests.unit.rollout.vllm_parsers import vllm_module

try:
    import openai_harmony

    protocol = vllm_module("entrypoints.openai.chat_completion.protocol")
except ImportError as error:
    missing("vllm-parsers", f"{error.name} is not installed; `make test-outside` runs them", whole_module=True)

Read = list[tuple[str, Any]]
PARSERS = {  # vLLM's module and class for each of our formats, and the family whose tokens it looks for
    "hermes": ("hermes", "Hermes2ProToolParser", "qwen3-coder"),
    "llama3_json": ("llama", "Llama3JsonToolParser", "qwen3-coder"),
    "qwen3_coder": ("qwen3_engine", "Qwen3EngineToolParser", "qwen3-coder"),
    "glm45": ("glm47_moe", "Glm47MoeModelToolParser", "glm"),
    "deepseek_v3": ("deepseekv3", "DeepSeekV3ToolParser", "deepseek-v3"),
    "deepseek_v3 3.1": ("deepseekv31", "DeepSeekV31ToolParser", "deepseek-v3.1"),
    "kimi_k2": ("kimi_k2", "KimiK2ToolParser", "kimi"),
    "minimax_m2": ("minimax_m2", "MinimaxM2ToolParser", "minimax"),
    "mistral": ("mistral", "MistralToolParser", "mistral"),
    "mistral old": ("mistral", "MistralToolParser", "qwen3-coder"),  # no [ARGS]
}
EXTRA = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]
CALL = '{"name": "add", "arguments": {"a": 7}}'
LLAMA = '{"name": "add", "parameters": {"a": 7}}'
QWEN = "<tool_call>\n<function=add>\n<parameter=a>\n7\n"
DEEP, DEEP_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
V3 = DEEP_CALL + 'function<｜tool▁sep｜>add\n```json\n{"a": 7}\n```<｜tool▁call▁end｜>'
V31 = DEEP_CALL + 'add<｜tool▁sep｜>{"a": 7}<｜tool▁call▁end｜>'
KIMI = "<|tool_calls_section_begin|>"
KIMI_CALL = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 7}'
INVOKE = '<invoke name="add">\n<parameter name="a">7</parameter>\n'


@cache
def tokenizer_for(name: str) -> Any:
    tokenizer = deepcopy(call_tokenizer(PARSERS[name][2]))
    tokenizer.add_tokens(EXTRA)
    return tokenizer


def theirs(name: str, text: str) -> Read:
    module, kind, _ = PARSERS[name]
    request = protocol.ChatCompletionRequest(messages=[], model="any", tools=[SCHEMA])
    parser = getattr(vllm_module(f"tool_parsers.{module}_tool_parser"), kind)(tokenizer_for(name), request.tools)
    calls = parser.extract_tool_calls(text, request).tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def ours(name: str, text: str) -> Read:
    calls = FORMATS[name.partition(" ")[0]].parse(text, [SCHEMA]).calls
    return [(call.name, dict(call.arguments)) for call in calls if isinstance(call, ToolCall)]


def answer_of(family: str, pairs: list[dict[str, Any]]) -> str:
    message = {"role": "assistant", "content": "", "tool_calls": to_message_calls(calls_of(family, pairs))}
    opened, eos = rendered(family, [USER], True), CALL_FAMILIES[family].eos
    return rendered(family, [USER, message], False).removeprefix(opened).partition(eos)[0]


@pytest.mark.parametrize("family", CALL_FAMILIES.keys() - {"harmony"})
def test_what_a_template_writes_is_the_same(family: str) -> None:
    """Of values that vLLM reads exactly: it strips text, and takes the None that Qwen's template prints for text."""
    pairs: list[dict[str, Any]] = [{"a": 7, "note": "8", "parts": [1, {"x": "é"}]}, {"note": "x\ny"}, {}, {"a": -1}]
    name = CALL_FAMILIES[family].form + {"deepseek-v3.1": " 3.1", "mistral-old": " old"}.get(family, "")
    for some in [pairs, *([one] for one in pairs)]:
        text = answer_of(family, some)
        assert json.dumps(ours(name, text)) == json.dumps(theirs(name, text))
        assert [arguments for _, arguments in ours(name, text)] == some


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"),
        ("hermes", f"<tool_call>\n{CALL}"),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> so"),
        ("llama3_json", LLAMA),
        ("llama3_json", CALL),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}"),
        ("llama3_json", f"{LLAMA};{LLAMA}"),
        ("llama3_json", f"{LLAMA}\n{LLAMA} so"),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": "7"}}'),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>"),
        ("qwen3_coder", QWEN.removeprefix("<tool_call>\n") + "</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", QWEN + "</parameter>\n</function>"),
        ("qwen3_coder", QWEN + "</parameter>\n</tool_call>"),
        ("qwen3_coder", QWEN + "<parameter=note>\nx\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", QWEN.replace("7", "7.0") + "</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", QWEN.replace("7", "seven") + "</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", QWEN.replace("=a", "=parts").replace("7", "['a', 1]") + "</parameter>\n</function>"),
        ("glm45", "Now.<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value></tool_call>"),
        ("glm45", "<tool_call>\nadd\n<arg_key>a</arg_key>\n<arg_value>\n7\n</arg_value>\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value> x </arg_value>"),
        ("deepseek_v3", f"So.{DEEP}{V3}\n{V3}<｜tool▁calls▁end｜>"),
        ("deepseek_v3", DEEP + V3),
        ("deepseek_v3 3.1", f"So.{DEEP}{V31}{V31}<｜tool▁calls▁end｜>"),
        ("kimi_k2", f"So.{KIMI}{KIMI_CALL}<|tool_call_end|>{KIMI_CALL.replace(':0', ':1')}<|tool_call_end|>"),
        ("kimi_k2", f"{KIMI}{KIMI_CALL.replace('functions.', '')}<|tool_call_end|><|tool_calls_section_end|>"),
        ("kimi_k2", KIMI + KIMI_CALL),
        ("minimax_m2", f"So.\n<minimax:tool_call>\n{INVOKE}</invoke>\n{INVOKE}</invoke>\n</minimax:tool_call>"),
        ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>"),
        ("minimax_m2", f"<minimax:tool_call>{INVOKE}</invoke>"),
        ("mistral", 'So.[TOOL_CALLS]add[ARGS]{"a": 7}[TOOL_CALLS]add{"a": 8}'),
        ("mistral old", f"So.[TOOL_CALLS] [{CALL},{CALL}] so"),
    ],
)
def test_what_models_write_besides_is_the_same(name: str, text: str) -> None:
    assert ours(name, text) == theirs(name, text) != []


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral old"])
def test_an_answer_without_calls_has_none(name: str) -> None:
    assert ours(name, "7 + 8 {is} 15") == theirs(name, "7 + 8 {is} 15") == []


@pytest.mark.parametrize("header", ["commentary to=functions.add <|constrain|>json", "commentary to=functions.add"])
def test_harmony_is_read_as_its_own_library_does(header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's parser around openai-harmony. The vocabulary is in litellm, in tiktoken's cache."""
    cached = next(file for file in distribution("litellm").files or () if file.name == O200K)
    shutil.copy(str(cached.locate()), tmp_path / "o200k_base.tiktoken")
    monkeypatch.setitem(os.environ, "TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    harmony, parser = vllm_module("parser.harmony"), vllm_module("tool_parsers.gptoss_tool_parser")
    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>{header}<|message|>" + '{"a": 7}'
    for end in ("<|call|>", ""):
        kind = type("Parser", (harmony.HarmonyParser,), {"tool_parser_cls": parser.GptOssToolParser})
        _, _, calls = kind(None).parse(
            "", None, model_output_token_ids=encoding.encode(text + end, allowed_special="all")
        )
        assert ours("harmony", text + end) == [(call.name, json.loads(call.arguments)) for call in calls]


O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"  # the name under which tiktoken caches o200k_base
