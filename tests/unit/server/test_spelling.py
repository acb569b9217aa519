"""Texts and bytes of single tokens: joined bytes are the text's, whatever the vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from octetrl.run.tiny_model import train_tokenizer
from octetrl.server.answers import Speller
from tests.byte_fallback import FIRST_BYTE, byte_fallback, id_of


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
