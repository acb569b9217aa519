"""Schemas that no text matches are refused; a schema that becomes a part of another one keeps its references."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octetrl.engine.grammars import Grammars
from octetrl.environments.tools.formats import FORMATS
from octetrl.server.answer_grammars import (
    MOST_REFERENCES,
    ResponseFormat,
    call_grammar,
    endless_reference,
    format_grammar,
)
from octetrl.server.errors import ApiError
from octetrl.server.requests import ChatBody, grammar_of

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v", "kids"],
}
TREE: dict[str, Any] = {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}
OWN: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {**OWN, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/~01", "$defs": {"~1": {"$ref": "#/$defs/~01"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]},
    ],
)
def test_a_schema_that_needs_itself_is_refused(schema: dict[str, Any]) -> None:
    assert endless_reference(schema) is not None
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for more in ({"response_format": form}, {"tools": tools, "tool_choice": "required"}):
        with pytest.raises(ApiError, match=r"the schema can't be followed: what '.ref': '#") as refused:
            grammar_of(ChatBody.model_validate_json(json.dumps(asked | more)), FORMATS["hermes"])
        assert refused.value.status == 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        OWN,
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "string"}, {"$ref": "#"}], "minItems": 1},
        {"required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
        {"const": {"$ref": "#"}},
        {"type": "string", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"$ref": "#/$defs/none"},
    ],
)
def test_a_schema_with_an_end_is_kept(schema: dict[str, Any]) -> None:
    assert endless_reference(schema) is None
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert format_grammar(form) is not None


def letters_tokenizer() -> Any:
    """One token for each byte, and EOS, 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return SimpleNamespace(backend_tokenizer=tokenizer)


def chain(links: int, order: random.Random) -> dict[str, Any]:
    """d0 needs d1 needs d2 and so on, in any order."""
    parts: dict[str, Any] = {f"d{links}": {"type": "string"}}
    for place in order.sample(range(links), links):
        needed = {"a": {"$ref": f"#/$defs/d{place + 1}"}}
        parts[f"d{place}"] = {"type": "object", "properties": needed, "required": ["a"]}
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def test_a_chain_of_references_is_followed_in_any_order_or_refused_by_its_length() -> None:
    """llguidance compiles references recursively: a long chain overflows the stack, and the process ends."""
    pytest.importorskip("llguidance")
    for seed in range(3):
        assert endless_reference(chain(MOST_REFERENCES - 1, random.Random(seed))) is None
    longest = {"type": "json_schema", "json_schema": {"name": "x", "schema": chain(249, random.Random(0))}}
    asked = format_grammar(ResponseFormat.model_validate(longest))
    assert asked is not None and Grammars(letters_tokenizer(), 257, [256]).guide(asked).failure is None
    longest["json_schema"] = {"name": "x", "schema": chain(250, random.Random(0))}
    with pytest.raises(ValueError, match="refers to 251 different subschemas; at most 250 are followed"):
        format_grammar(ResponseFormat.model_validate(longest))
    longest["json_schema"] = {"name": "x", "schema": {"enum": ["x" * 100] * 2600}}
    with pytest.raises(ValueError, match="the schema has 270,410 characters of JSON; at most 262,144"):
        format_grammar(ResponseFormat.model_validate(longest))
    tools = [{"name": f"f{place}", "parameters": {"enum": ["x" * 100] * 1300}} for place in range(2)]
    with pytest.raises(ValueError, match="their schemas together have 270,"):
        call_grammar(tools, FORMATS["hermes"], several=True)


@pytest.mark.parametrize("family", ["hermes", "llama3_json"])
def test_references_of_a_tool_lead_into_its_own_schema(family: Any) -> None:
    """The second of two tools has definitions, as pydantic writes them."""
    pytest.importorskip("llguidance")
    fast = letters_tokenizer()
    parameters = {"type": "object", "properties": {"t": {"$ref": "#/$defs/node"}}, "required": ["t"]}
    tools = [{"name": "g"}, {"name": "f", "parameters": {**parameters, "$defs": {"node": NODE}}}]
    guide = Grammars(fast, 257, [256]).guide(call_grammar(tools, FORMATS[family], several=False))
    key = "arguments" if family == "hermes" else "parameters"
    text = json.dumps({"name": "f", key: {"t": {"v": 1, "kids": [{"v": 2, "kids": []}]}}})
    for token in fast.backend_tokenizer.encode(
        f"<tool_call>\n{text}\n</tool_call>" if family == "hermes" else text
    ).ids:
        mask = guide.mask()
        assert mask[token // 32] >> (token % 32) & 1, "the token may follow"
        guide.see(token)
    assert guide.failure is None and guide.mask()[8] & 1, "EOS may follow"
