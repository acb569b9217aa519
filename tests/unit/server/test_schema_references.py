"""Schemas that no text matches are refused; a schema that becomes a part of another one keeps its references."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octetrl.engine.grammars import Grammars
from octetrl.server.answer_grammars import ResponseFormat, call_grammar, format_grammar
from octetrl.server.errors import ApiError
from octetrl.server.requests import ChatBody, grammar_of
from octetrl.server.schema_references import endless_reference

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
            grammar_of(ChatBody.model_validate_json(json.dumps(asked | more)), "hermes")
        assert refused.value.status == 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        OWN,
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
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


@pytest.mark.parametrize("family", ["hermes", "llama3_json"])
def test_references_of_a_tool_lead_into_its_own_schema(family: Any) -> None:
    """The second of two tools has definitions, as pydantic writes them."""
    pytest.importorskip("llguidance")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])

    class Fast:
        backend_tokenizer = tokenizer

    parameters = {"type": "object", "properties": {"t": {"$ref": "#/$defs/node"}}, "required": ["t"]}
    tools = [{"name": "g"}, {"name": "f", "parameters": {**parameters, "$defs": {"node": NODE}}}]
    guide = Grammars(Fast(), 257, [256]).guide(call_grammar(tools, family, several=False))
    key = "arguments" if family == "hermes" else "parameters"
    text = json.dumps({"name": "f", key: {"t": {"v": 1, "kids": [{"v": 2, "kids": []}]}}})
    for token in tokenizer.encode(f"<tool_call>\n{text}\n</tool_call>" if family == "hermes" else text).ids:
        mask = guide.mask()
        assert mask[token // 32] >> (token % 32) & 1, "the token may follow"
        guide.see(token)
    assert guide.failure is None and guide.mask()[8] & 1, "EOS may follow"
