"""Any text becomes tokens, and one that cannot fit is refused by its length, never one that fits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from octetrl.records import Completion, GenerationRequest, Reply, RolloutStatus, SamplingParams, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import Collecting, CollectionSettings, collect_groups
from octetrl.rollout.encode import Encoder, characters_per_token
from octetrl.run.tiny_model import train_tokenizer
from octetrl.system.text import TextTooLong

TEXTS = ["abababab ab 1 + 2 = 3", "aaaaaaaaaaaaaaaa    ", "한국어 한국어 á á"]
LONG = "x" * 5_000_000


def tokenizer_with(normalizer: Any = None, pre_tokenizer: Any = None, special: Any = None) -> Any:
    tokenizer = train_tokenizer(TEXTS, vocab_size=330)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if special is not None:
        tokenizer.add_tokens([special])
    return tokenizer


@pytest.fixture(scope="module")
def bounded() -> list[Any]:
    chain = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "__")])
    return [tokenizer_with(), tokenizer_with(normalizers.NFC()), tokenizer_with(chain)]


pieces = st.sampled_from(
    ["a", "ab", " ", "\u1112\u1161\u11ab", "\u212b", "a\u0301", "α\u0313\u0301\u0345", "\ud800", "字"]
)


@given(st.lists(pieces, max_size=40).map("".join))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_text_that_fits_is_never_refused(bounded: Sequence[Any], text: str) -> None:
    for tokenizer in bounded:
        found = len(Encoder(tokenizer).ids(text, special=False))
        most = characters_per_token(tokenizer)
        assert most is not None and len(text) <= most * found
        assert len(Encoder(tokenizer, found).ids(text, special=False)) == found


@pytest.mark.parametrize(
    "given",
    [
        {"normalizer": normalizers.Strip()},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"special": AddedToken("<mask>", lstrip=True)},
        {"special": AddedToken("<mask>", rstrip=True)},
    ],
)
def test_where_text_may_be_dropped_there_is_no_bound(given: dict[str, Any]) -> None:
    assert characters_per_token(tokenizer_with(**given)) is None


class NothingIsDrawn:
    def generate(self, requests: Sequence[GenerationRequest], *_: object) -> list[list[Completion]]:
        assert not requests
        return []


class NothingIsScored:
    def score(self, completions: Sequence[Any]) -> list[Any]:
        assert not completions
        return []


def test_a_prompt_of_5_mb_is_refused_at_once(bounded: Sequence[Any]) -> None:
    chat = ChatTokens(bounded[0], context_length=64)
    began = time.process_time()
    Encoder(bounded[0]).ids(LONG[: len(LONG) // 50], special=False)
    part = time.process_time() - began
    began = time.process_time()
    collection = CollectionSettings(chat, SamplingParams(8), group_size=2, max_prompt_tokens=32)
    (group,) = collect_groups([Task("1", LONG)], NothingIsScored(), NothingIsDrawn(), collection, Collecting())  # type: ignore[arg-type]
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.PROMPT_TOO_LONG] * 2
    detail = str(group.rollouts[0].detail)
    assert "the prompt has 5,000,0" in detail and "tokens, more than 32" in detail
    for encode in (
        chat.prompt_tokens,
        chat.answer_tokens,
        lambda text: chat.reply_tokens([Reply("user", text)], (1,)),
        lambda text: chat.message_tokens([{"role": "user", "content": text}]),
    ):
        with pytest.raises(TextTooLong):
            encode(LONG)
    assert len(chat.first_prompt_tokens(LONG, 32)) == 32
    assert time.process_time() - began < 25 * part  # it is not tokenized once, which takes 50 times such a part


def test_half_a_character_is_written_out(bounded: Sequence[Any]) -> None:
    chat = ChatTokens(bounded[0])
    assert chat.prompt_tokens("a\ud800") == chat.prompt_tokens("a\\ud800")
    assert chat.answer_tokens("\udcff") == chat.answer_tokens("\\udcff")
    assert chat.reply_tokens([Reply("user", "\ud800")], ()) == chat.reply_tokens([Reply("user", "\\ud800")], ())
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a\udfff"}]
    written = [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a\\udfff"}]
    assert chat.message_tokens(messages) == chat.message_tokens(written)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_server_refuses_it_too(bounded: Sequence[Any], kind: str) -> None:
    pytest.importorskip("starlette")
    from octetrl.server.errors import ApiError
    from octetrl.server.prompts import Prompts
    from octetrl.server.requests import ChatBody, CompletionBody, Message

    prompts = Prompts(bounded[0], vocab_size=330, context_length=64)
    messages = [Message(role="user", content=LONG)]
    asked: Any = prompts.of_chat(ChatBody(model="m", messages=messages))
    if kind == "completion":
        asked.close()
        asked = prompts.of_completion(CompletionBody(model="m", prompt=LONG))
    with pytest.raises(ApiError, match="context is 64 tokens; the prompt has 5,000,0"):
        asyncio.run(asked)
