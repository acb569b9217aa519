"""Stop tokens, stop strings across token borders, and text that grows token by token."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.engine.stopping import INCOMPLETE, Stopping, StopStrings, TextDecoder, TextStream, decoder_of
from octetrl.records import FinishReason
from octetrl.run.tiny_model import train_tokenizer
from tests.byte_fallback import FIRST_BYTE, SIZE, byte_fallback, id_of

TEXTS = ["The answer is 42. hello hello world", "grüße 你好 😀😀 naïve café"]


@lru_cache(maxsize=1)
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


def decode_bytes() -> TextDecoder:
    return decoder_of(tokenizer())


def pieces(*parts: str) -> list[int]:
    """Tokens of each part on its own, so that the borders between parts are token borders."""
    return [token for part in parts for token in tokenizer().encode(part, add_special_tokens=False)]


def feed(stops: tuple[str, ...], tokens: list[int]) -> tuple[int | None, str]:
    """After how many tokens the watch stops, and the text."""
    watch = StopStrings(stops, decode_bytes())
    for count, token in enumerate(tokens, start=1):
        if watch.found_after(token):
            return count, watch.cut(decode_bytes()(tuple(tokens[:count])))
    return None, watch.cut(decode_bytes()(tuple(tokens)))


def test_a_character_of_several_tokens_appears_whole() -> None:
    tokens = pieces("a€b")  # not in the training texts: three byte tokens
    assert len(tokens) == 5
    stream = TextStream(decode_bytes())
    seen = []
    for token in tokens:
        stream.push(token)
        seen.append(stream.text)
    assert seen == ["a", "a", "a", "a€", "a€b"]


def test_a_stop_string_is_found_across_token_borders() -> None:
    tokens = pieces("he", "l", "l", "o", "#", "#", "#", " tail")
    count, text = feed(("###",), tokens)
    assert text == "hello" and tokenizer().decode(tokens[:count]) == "hello###"


def test_a_stop_string_inside_one_token_cuts_the_text() -> None:
    (token,) = pieces(" hello")
    assert feed(("ll",), [token, *pieces("x")]) == (1, " he")


def test_the_first_of_several_stop_strings_wins() -> None:
    assert feed(("llo", "hell", "zzz"), pieces("hello"))[1] == ""


def test_a_stop_string_of_several_bytes() -> None:
    assert feed(("€",), pieces("a€b")) == (4, "a")


def test_without_a_match_the_text_is_all_of_it() -> None:
    assert feed(("@@",), pieces("hello @ world")) == (None, "hello @ world")


@pytest.mark.parametrize(
    ("token_ids", "reason", "length", "text"),
    [
        ([5, 6, 1, 7], FinishReason.STOP, 3, "5 6"),
        ([5, 9, 6], FinishReason.STOP, 2, "5"),
        ([5, 6, 7, 8], FinishReason.LENGTH, 4, "5 6 7 8"),
        ([5, 6, 7, 1], FinishReason.STOP, 4, "5 6 7"),
    ],
)
def test_stop_tokens_and_the_limit(token_ids: list[int], reason: FinishReason, length: int, text: str) -> None:
    """EOS 1 and stop token 9; three tokens of prompt and at most seven in all. A stop at the limit is a stop."""

    def decode(tokens: tuple[int, ...]) -> str:
        return " ".join(map(str, tokens))

    stopping = Stopping(frozenset({1, 9}), (), limit=7, decode=TextDecoder(decode))
    for count, token in enumerate(token_ids, start=1):
        ended = stopping.after(token, 3 + count)
        if ended is not None:
            break
    assert (ended, count) == (reason, length)
    assert stopping.text_of(token_ids[:count], decode) == text


# ---------------------------------------------------------------- byte fallback: a run of bytes is decoded as a whole

BYTES = st.integers(FIRST_BYTE, FIRST_BYTE + 255) | st.sampled_from(
    [FIRST_BYTE + byte for byte in (0x0A, 0x23, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xFF)]
)
FALLBACK = (byte_fallback, st.lists(st.integers(0, SIZE - 1) | BYTES, max_size=30))
BYTE_LEVEL = (tokenizer, st.lists(st.integers(0, 299), max_size=40))
DRAWN = st.one_of(*(st.tuples(st.just(made), tokens) for made, tokens in (BYTE_LEVEL, FALLBACK)))


@settings(max_examples=300)
@given(DRAWN)
def test_the_stream_is_a_beginning_of_the_whole_text_and_ends_with_it(drawn: tuple[Any, list[int]]) -> None:
    """Random tokens: broken characters, special tokens and stray bytes included."""
    made, tokens = drawn
    decode = decoder_of(made())
    stream, whole = TextStream(decode), decode(tuple(tokens))
    for count, token in enumerate(tokens, start=1):
        before = stream.text
        stream.push(token)
        assert stream.text.startswith(before) and whole.startswith(stream.text)
        assert made is tokenizer or stream.finish() == decode(tuple(tokens[:count]))
    assert stream.finish() == whole


@settings(max_examples=300)
@given(DRAWN, st.lists(st.text("abel \no#é中.", min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_completion_ends_with_the_first_token_that_completes_a_stop_string(
    drawn: tuple[Any, list[int]], stops: list[str]
) -> None:
    """Stop strings that the text does not contain change neither its tokens nor its text."""
    made, tokens = drawn
    decode = decoder_of(made())
    stopping = Stopping(frozenset(), stops, limit=len(tokens), decode=decode)
    texts = [decode(tuple(tokens[:count])) for count in range(1, len(tokens) + 1)]
    for count, (token, text) in enumerate(zip(tokens, texts, strict=True), start=1):
        found = [at for at in (text.rstrip(INCOMPLETE).find(stop) for stop in stops) if at >= 0]
        reason = stopping.after(token, count)
        if found:
            assert reason is FinishReason.STOP
            assert stopping.text_of(tokens[:count], decode) == text[: min(found)]
            return
        assert reason is (FinishReason.LENGTH if count == len(tokens) else None)
        assert stopping.text_of(tokens[:count], decode) == text


def test_a_byte_that_spoils_its_run_is_not_streamed_before_the_run_ends() -> None:
    decode = decoder_of(byte_fallback())
    stream = TextStream(decode)
    seen = []
    for token in (id_of("▁a"), id_of("\n"), FIRST_BYTE + 0xFF, 2, id_of("▁the")):  # 2: special, no text
        stream.push(token)
        seen.append((stream.text, stream.so_far()))
    assert seen == [("a", "a"), ("a", "a\n"), ("a", "a"), ("a", "a"), ("a\ufffd\ufffd the", "a\ufffd\ufffd the")]


def test_a_line_break_of_a_byte_ends_a_completion_at_once() -> None:
    stopping = Stopping(frozenset(), ("\n",), limit=9, decode=decoder_of(byte_fallback()))
    tokens = [id_of("▁a"), id_of("\n")]
    assert [stopping.after(token, 0) for token in tokens] == [None, FinishReason.STOP]
    assert stopping.text_of(tokens, decoder_of(byte_fallback())) == "a"
