"""What may be shown of an answer while it is drawn: pieces that add up to the whole, whatever the text."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octetrl.engine.stopping import Stopping, decoder_of
from octetrl.environments.tools.formats import FORMATS
from octetrl.records import Completion, FinishReason, SessionEvent
from octetrl.run.tiny_model import train_tokenizer
from octetrl.server.answer_grammars import call_grammar
from octetrl.server.answers import ChatForm, Speller
from octetrl.server.choices import Choice, ChoicePiece
from octetrl.server.errors import ApiError
from octetrl.server.prompts import Prompts
from octetrl.server.requests import ChatBody
from tests.byte_fallback import FIRST_BYTE, byte_fallback, id_of
from tests.unit.rollout.call_templates import call_tokenizer

CALL = '<tool_call>{"name": "f", "arguments": {"x": "<tool_call> 🦊"}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": 1}}'
BITS = [
    *"aé🦊 \n{}<;",
    "ab",
    "<tool",
    CALL,
    LLAMA,
    "<think>",
    "</think>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<function=f>",
    "<|channel|>final<|message|>",
]


class Bytes:
    """Token n is the byte n; 0 ends."""

    eos_token_id = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(token for token in token_ids if token).decode(errors="replace")


DECODE = decoder_of(Bytes())


def drawn(said: bytes, stops: tuple[str, ...]) -> list[SessionEvent]:
    """As the engine tells it, token by token: until a stop string, or the end."""
    stopping = Stopping(frozenset({0}), stops, len(said) + 1, DECODE)
    tokens: list[int] = []
    for token in (*said, 0):
        tokens.append(token)
        if stopping.after(token, len(tokens)) is not None:
            break
    text = stopping.text_of(tokens, DECODE)
    completion = Completion(tuple(tokens), (-1.0,) * len(tokens), text, FinishReason.STOP, 0, "")
    events = [SessionEvent("r", 0, (token,), (-1.0,), None) for token in tokens[:-1]]
    return [*events, SessionEvent("r", 0, (tokens[-1],), (-1.0,), completion)]


def whole_and_pieces(said: bytes, stops: tuple[str, ...], family: str | None) -> tuple[ChoicePiece, list[ChoicePiece]]:
    events = drawn(said, stops)
    completion = events[-1].completion
    assert completion is not None

    def choice() -> Choice:
        tool_format = None if family is None else FORMATS[family]
        return Choice(0, decode=DECODE, stops=stops, tool_format=tool_format, logprobs=True)

    whole = choice().take(SessionEvent("r", 0, completion.token_ids, completion.logprobs, completion))
    streamed = choice()
    return whole, [streamed.take(event) for event in events]


@settings(max_examples=400)
@given(
    st.one_of(st.lists(st.sampled_from(BITS), max_size=8).map("".join).map(str.encode), st.binary(max_size=40)),
    st.lists(st.sampled_from(["ab", "b🦊", "é\n", "{", "</t", "aa"]), max_size=2, unique=True),
    st.sampled_from([None, *FORMATS]),
)  # fmt: skip
@example(b"<<|python_tag|>", [], "llama3_json")  # the first "<" is shown, and then might begin the call
def test_pieces_add_up_to_the_whole(said: bytes, stops: list[str], family: str | None) -> None:
    said = bytes(byte for byte in said if byte)
    whole, pieces = whole_and_pieces(said, tuple(stops), family)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert [piece.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1].calls) == (whole.finish_reason, whole.calls)
    assert sum((piece.offsets for piece in pieces), ()) == whole.offsets
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids


def test_text_is_shown_as_soon_as_it_is_sure() -> None:
    _, pieces = whole_and_pieces("one 🦊 tw".encode(), ("two",), None)
    assert [piece.text for piece in pieces] == [*"one ", "", "", "", "🦊", " ", "", "", "tw"]


@pytest.mark.parametrize(
    ("family", "said", "shown", "rest", "calls"),
    [
        ("hermes", f" I look. {CALL} So.", "I look.", "\nSo.", 1),
        ("hermes", "a <b> c", "a <b> c", "", 0),
        ("hermes", "x <tool_call>{oops", "x", "\n<tool_call>{oops", 0),
        ("llama3_json", f"{LLAMA}; {LLAMA}", "", "", 2),
        ("llama3_json", "see {1, 2}", "see", " {1, 2}", 0),
    ],
)
def test_calls_are_held_back_and_read_at_the_end(family: str, said: str, shown: str, rest: str, calls: int) -> None:
    _, pieces = whole_and_pieces(said.encode(), (), family)
    *before, last = pieces
    assert ("".join(piece.text for piece in before), last.text, len(last.calls)) == (shown, rest, calls)
    assert last.finish_reason == ("tool_calls" if calls else "stop")
    if calls == 1:
        assert json.dumps(dict(last.calls[0].arguments)) == json.dumps({"x": "<tool_call> 🦊"})


def test_an_answer_cut_off_after_a_call_ends_by_its_length() -> None:
    tokens = tuple(f"{CALL} and".encode())
    completion = Completion(tokens, (-1.0,) * len(tokens), f"{CALL} and", FinishReason.LENGTH, 0, "")
    choice = Choice(0, decode=DECODE, stops=(), tool_format=FORMATS["hermes"], logprobs=False)
    piece = choice.take(SessionEvent("r", 0, tokens, completion.logprobs, completion))
    assert (piece.finish_reason, len(piece.calls)) == ("length", 1)


def test_the_parts_of_a_character_have_their_bytes() -> None:
    tokenizer = train_tokenizer(["1 + 1"], vocab_size=280)
    tokens = tokenizer.encode(" 🦊é", add_special_tokens=False)
    bytes_of = Speller(tokenizer).bytes_of
    assert [bytes_of(token) for token in tokens] == [[byte] for byte in " 🦊é".encode()]
    assert bytes_of(tokenizer.eos_token_id) == list(b"<|end|>")


def test_byte_fallback_has_bytes_and_keeps_the_space_of_a_word() -> None:
    spell = Speller(byte_fallback())
    tokens = (FIRST_BYTE + 0xE4, id_of("\n"), id_of("▁the"), id_of("é"), id_of("\ufffd"), 2)
    assert [bytes(spell.bytes_of(token)) for token in tokens] == [
        b"\xe4", b"\n", b" the", "é".encode(), "\ufffd".encode(), b"</s>",
    ]  # fmt: skip
    assert [spell.of_one(token) for token in tokens] == ["\ufffd", "\n", " the", "é", "\ufffd", "</s>"]
    assert spell((id_of("▁the"),)) == "the"


@cache
def bytes_and_merges() -> Any:
    return train_tokenizer(["grüße 你好 1 + 1"], vocab_size=300)


@settings(max_examples=100)
@given(st.text())
@example("中\x00\u00ad 🦊")
def test_joined_bytes_are_the_text(text: str) -> None:
    tokenizer = bytes_and_merges()
    spell = Speller(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert bytes(byte for token in tokens for byte in spell.bytes_of(token)).decode() == text


def test_calls_of_special_tokens_are_read_and_shown_nowhere() -> None:
    tokenizer = call_tokenizer("mistral")
    prompts = Prompts(tokenizer, vocab_size=len(tokenizer), context_length=99, ends=(tokenizer.eos_token_id,))
    tokens = tokenizer.encode('I look.[TOOL_CALLS]f[ARGS]{"x": 1}</s>', add_special_tokens=False)
    decode = decoder_of(tokenizer)
    completion = Completion(tuple(tokens), (-1.0,) * len(tokens), decode(tuple(tokens)), FinishReason.STOP, 0, "")
    choice = Choice(
        0, decode=decode, stops=(), tool_format=prompts.tool_format, logprobs=False, call_text=prompts.call_text
    )
    *before, last = [
        choice.take(SessionEvent("r", 0, (token,), (-1.0,), completion if place == len(tokens) - 1 else None))
        for place, token in enumerate(tokens)
    ]
    assert "".join(piece.text for piece in before) == "I look."
    assert (last.text, last.finish_reason) == ("", "tool_calls")
    assert [(call.name, call.arguments) for call in last.calls] == [("f", {"x": 1})]
    form = ChatForm(
        "m", Speller(tokenizer), logprobs=False, token_ids=False, prompts=[()], num_siblings=1, call_ids="nine"
    )
    (shown,) = form.choice(last)["message"]["tool_calls"]
    assert len(shown["id"]) == 9 and shown["id"].isalnum()


@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v3.1"])
def test_calls_of_the_history_have_arguments_as_the_template_takes_them(family: str) -> None:
    tokenizer = call_tokenizer(family)
    prompts = Prompts(tokenizer, vocab_size=len(tokenizer), context_length=999)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    body = ChatBody.model_validate_json(json.dumps({"model": "m", "messages": said}))
    text = tokenizer.decode(list(asyncio.run(prompts.of_chat(body))))
    assert '{"x": 1}' in text and text.endswith("<｜tool▁output▁begin｜>1<｜tool▁output▁end｜>")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_can_be_demanded_where_they_are_json_objects(name: str) -> None:
    if name in ("hermes", "llama3_json"):
        assert call_grammar([{"name": "f"}], FORMATS[name], several=True)
        return
    with pytest.raises(ValueError, match=name):
        call_grammar([{"name": "f"}], FORMATS[name], several=True)


def test_tools_that_the_template_would_not_show_are_refused() -> None:
    """A format named by hand reads calls of any model, but this template writes no tools into the prompt."""
    tokenizer = bytes_and_merges()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    prompts = Prompts(tokenizer, vocab_size=len(tokenizer), context_length=99, tool_format="hermes")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    asked = {"model": "m", "messages": [{"role": "user", "content": "1"}]}
    assert asyncio.run(prompts.of_chat(ChatBody.model_validate(asked)))
    with pytest.raises(ApiError) as refusal:
        asyncio.run(prompts.of_chat(ChatBody.model_validate(asked | {"tools": tools})))
    assert refusal.value.param == "tools" and refusal.value.status == 400
