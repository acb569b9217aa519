"""Penalties, biases, least lengths, grammars and further log-probs: right by a formula written out here, and without
any effect on requests that do not ask for them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from octetrl.engine.logit_options import SequenceLogits
from octetrl.engine.row_edits import RowEdits
from octetrl.records import Completion, EventDetails, GenerationRequest, LogitOptions
from octetrl.system.errors import UserError
from tests.unit.engine.tiny_engine import EOS, request, tiny_engine

PLAIN = [
    request("drawn", prompt_length=21, num_siblings=2, seed=1, max_new_tokens=20, ignore_eos=True),
    request("filtered", prompt_length=1, num_siblings=2, seed=2, max_new_tokens=9, top_k=20, top_p=0.9),
    request("greedy", prompt_length=33, seed=3, max_new_tokens=12, temperature=0.0),
]
EVERYTHING = LogitOptions(
    min_new_tokens=4, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((7, 3.0),),
    num_top=3, prompt_logprobs=True,
)  # fmt: skip


def asking(name: str, options: LogitOptions, **settings: Any) -> GenerationRequest:
    return request(name, **{"max_new_tokens": 16, "ignore_eos": True, **settings}, logits=options)


def answers(
    asked: list[GenerationRequest], lag: int = 0, precision: str = "bf16", stream: bool = False, **config: Any
) -> tuple[dict[tuple[str, int], Completion], dict[tuple[str, int], list[EventDetails]]]:
    engine = tiny_engine(precision, page_size=16, **config)
    engine._lag = lag
    found, details = {}, {}
    with engine.session() as session:
        for one in asked:
            session.submit(one, streams=stream)
        while session.has_work:
            for event in session.events():
                key = (event.request_id, event.sibling)
                details.setdefault(key, []).extend([event.details] if event.details else [])
                if event.completion is not None:
                    found[key] = event.completion
            session._scheduler.check()
    return found, details


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("config", [{}, {"kv_cache_tokens": 128, "prefill_chunk": 16}])
def test_requests_without_options_keep_every_bit(lag: int, config: dict[str, Any]) -> None:
    alone, _ = answers(PLAIN)
    company = [asking("all", EVERYTHING, num_siblings=3, temperature=0.7), asking("top", LogitOptions(num_top=2))]
    together, _ = answers([company[0], *PLAIN, company[1]], lag, **config)
    assert {key: together[key] for key in alone} == alone
    roomy, _ = answers(company)
    assert {key: together[key] for key in roomy} == roomy, "options give one answer, whatever else runs"


def test_options_without_effect_draw_the_same_tokens() -> None:
    (plain,) = answers([asking("r", LogitOptions(), temperature=0.8)])[0].values()
    neutral = LogitOptions(repetition_penalty=1.0, num_top=4, prompt_logprobs=True, logit_bias=((3, 0.0),))
    (same,) = answers([asking("r", neutral, temperature=0.8)])[0].values()
    assert same == plain


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_logprobs_of_prompts_and_answers_are_the_same_bits(precision: str) -> None:
    """What was sampled under penalties, sent back as a prompt, has the log-probs of its sampling."""
    first = asking("first", EVERYTHING, temperature=0.7, num_siblings=2)
    found, details = answers([first], precision=precision)
    for sibling in range(2):
        completion = found["first", sibling]
        assert len(set(completion.token_ids)) > 5
        told = details["first", sibling]
        assert sum(len(one.tops) for one in told) == len(completion.token_ids)
        assert told[0].prompt is not None and len(told[0].prompt.logprobs) == len(first.prompt_token_ids) - 1
        again = GenerationRequest(
            "again",
            (*first.prompt_token_ids, *completion.token_ids),
            request(max_new_tokens=1, temperature=0.7, logits=LogitOptions(num_top=3, prompt_logprobs=True)).sampling,
            num_siblings=2 - sibling,  # with a shared prefix and without
        )
        _, scored = answers([again, again_in_pieces(again)], precision=precision, prefill_chunk=16)
        for key in ("again", 0), ("pieces", 0):
            prompt = scored[key][0].prompt
            assert prompt is not None
            n = len(completion.token_ids)
            assert prompt.logprobs[-n:] == completion.logprobs
            assert prompt.logprobs[:-n] == told[0].prompt.logprobs
            assert prompt.tops[-n:] == tuple(top for one in told for top in one.tops)


def again_in_pieces(one: GenerationRequest) -> GenerationRequest:
    """The same prompt, asked for when its pages are cached."""
    return GenerationRequest("pieces", one.prompt_token_ids, one.sampling)


def test_the_likeliest_tokens_are_sorted_and_normalised() -> None:
    found, details = answers([asking("r", LogitOptions(num_top=20), temperature=0.5)], stream=True)
    tops = [top for one in details["r", 0] for top in one.tops]
    for top, token, logprob in zip(tops, found["r", 0].token_ids, found["r", 0].logprobs, strict=True):
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert sum(math.exp(value) for _, value in top) <= 1 + 1e-5
        assert dict(top).get(token, logprob) == logprob


def test_penalties_follow_the_formula() -> None:
    torch.manual_seed(0)
    logits_BV = torch.randn(3, 50) * 5
    options = LogitOptions(
        presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.7, logit_bias=((4, 2.5), (11, -100.0))
    )
    state = SequenceLogits(options, frozenset({EOS}), frozenset({4, 5}))
    state.see([9, 9, 4, 9])
    edits = RowEdits([(1, state)], torch.device("cpu"))
    edited_BV = edits.edited(logits_BV)
    assert torch.equal(edited_BV[[0, 2]], logits_BV[[0, 2]])
    z = logits_BV[1].double().numpy().copy()
    z[4] += 2.5
    z[11] -= 100
    for token in (4, 5, 9):
        z[token] = z[token] / 1.7 if z[token] > 0 else z[token] * 1.7
    z[9] -= 3 * -0.4 + 0.7
    z[4] -= 1 * -0.4 + 0.7
    assert np.allclose(edited_BV[1].numpy(), z, rtol=1e-6, atol=1e-6)
    untouched = np.setdiff1d(np.arange(50), (4, 5, 9, 11))
    assert torch.equal(edited_BV[1, untouched], logits_BV[1, untouched])


def test_a_row_that_is_not_finite_stays_an_error() -> None:
    logits_BV = torch.full((1, 50), math.nan)
    state = SequenceLogits(LogitOptions(min_new_tokens=1), frozenset(range(50)), frozenset())
    assert RowEdits([(0, state)], torch.device("cpu")).edited(logits_BV).isnan().all()


def test_no_stop_token_comes_before_the_least_length() -> None:
    stops = tuple(range(2, 40))
    common: dict[str, Any] = {"stop_token_ids": stops, "ignore_eos": False, "num_siblings": 8}
    short = answers([asking("r", LogitOptions(num_top=1), **common)])[0].values()
    assert min(len(one.token_ids) for one in short) < 4
    for one in answers([asking("r", LogitOptions(min_new_tokens=6), **common)])[0].values():
        assert not {*stops, EOS} & set(one.token_ids[:6]) and len(one.token_ids) >= 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LogitOptions(min_new_tokens=99), "min_new_tokens is 99"),
        (LogitOptions(presence_penalty=2.5), "presence_penalty is 2.5; give -2 to 2"),
        (LogitOptions(repetition_penalty=1e-40), "repetition_penalty is 1e-40; give 0.01 to 10"),
        (LogitOptions(logit_bias=((50, 1.0),)), r"logit_bias is \[50\]; give token ids below 50"),
        (LogitOptions(num_top=21), "give 0 to 20"),
    ],
)
def test_options_out_of_range_are_refused(options: LogitOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        answers([asking("r", options)])


class Bits:
    """A tokenizer.json's worth of letters for llguidance: one token for each printable character."""

    eos_token_id = EOS

    def __init__(self) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        letters = ["<pad>", "</s>", *'{}[]":,\u0120.0123456789abcdefnrstulm-']
        vocabulary = {letter: place for place, letter in enumerate(letters)}
        self.backend_tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
        self.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend_tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens(["<pad>", "</s>"])
        self._letters = letters

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(
            self._letters[token].replace("\u0120", " ") for token in token_ids if EOS < token < len(self._letters)
        )


def test_answers_match_their_schema_and_others_keep_their_bits() -> None:
    pytest.importorskip("llguidance")
    from octetrl.engine.grammars import json_grammar

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["aa", "cd"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    options = LogitOptions(grammar=json_grammar(schema), num_top=1)
    guided = request("guided", num_siblings=6, max_new_tokens=120, logits=options)
    engine = tiny_engine(tokenizer=Bits(), page_size=16, kv_cache_tokens=640)
    engine._lag = 2
    with_guide = engine.generate([guided, *PLAIN])
    without = tiny_engine(tokenizer=Bits()).generate(PLAIN)
    assert with_guide[1:] == without
    ended = [one for one in with_guide[0] if one.token_ids[-1] == EOS]
    assert len(ended) > 3
    for one in ended:
        value = json.loads(one.text)
        assert isinstance(value["a"], int) and value["a"] <= 99 and value["b"] in ("aa", "cd")
        assert set(value) == {"a", "b"}
    assert len({one.text for one in ended}) > 1
    with pytest.raises(UserError, match="the schema can't be followed"):
        engine.generate([request("bad", logits=LogitOptions(grammar=json_grammar({"type": "strin"})))])
