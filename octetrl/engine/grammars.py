"""Grammars that an answer must match, compiled by llguidance (github.com/guidance-ai/llguidance, arXiv:2411.15100).

A grammar is a text: llguidance's JSON form, made from a JSON schema (`json_grammar`), or Lark's form, in which `%json`
embeds a schema. It is compiled once; each answer gets a copy of its state. After each token the copy says which tokens
may follow, as one bit a token. At the end of the grammar only EOS may follow.

White space between the parts of JSON is limited to `WHITE_SPACE`: a model that writes blanks without end would never
reach the limit of its tokens with a valid text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from octetrl.system.errors import UserError

WHITE_SPACE = r"[ \n]{0,64}"
KEPT = 256  # compiled grammars
TRIED = 3  # tokens of an answer, when a grammar is compiled


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a JSON schema describes."""
    form = {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}}
    return json.dumps({"grammars": [form]})


class Grammars:
    """Compiles grammars for one tokenizer. `vocab_size`: the model's, at least the tokenizer's."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._vocabulary: Any = None  # built for the first grammar: about a second at 150,000 tokens
        self._compiled: dict[str, Any] = {}

    def guide(self, grammar: str) -> GrammarGuide:
        """The state of a new answer. Raises UserError for a grammar that can't be compiled."""
        if grammar not in self._compiled:
            matcher = self._compile(grammar)
            if len(self._compiled) == KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = matcher
        return GrammarGuide(self._compiled[grammar].deep_copy(), self._vocab_size, self._eos)

    def _compile(self, grammar: str) -> Any:
        if find_spec("llguidance") is None:
            raise UserError(
                "the server was started without the package 'llguidance', which JSON modes and required tools need;"
                " pip install 'octetrl[serve]', or leave out response_format and tool_choice"
            )
        import llguidance

        if self._vocabulary is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise UserError(
                    "this model's tokenizer has no tokenizer.json, which JSON modes and required tools need; leave out"
                    " response_format and tool_choice"
                )
            try:
                self._vocabulary = llguidance.LLTokenizer(
                    backend.to_str(), n_vocab=self._vocab_size, eos_token=list(self._eos)
                )
            except ValueError as error:
                raise UserError(
                    f"llguidance can't read this model's tokenizer ({error}); leave out response_format and tool_choice"
                ) from error
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        failure = _in_one_line(matcher.get_error()) if matcher.is_error() else self._tried(matcher)
        if failure is not None:
            raise UserError(f"the schema can't be followed: {failure}; change it, or leave it out")
        return matcher

    def _tried(self, matcher: Any) -> str | None:
        """What fails in the first tokens of an answer: llguidance meets some of its limits only there."""
        guide = GrammarGuide(matcher.deep_copy(), self._vocab_size, self._eos)
        for _ in range(TRIED):
            allowed_V = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
            if guide.failure is None:
                guide.see(int(allowed_V.argmax()))
        return guide.failure


class GrammarGuide:
    """Follows one answer (logit_options.Guide)."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._only_eos_W = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        for token in eos_token_ids:
            self._only_eos_W[token // 32] |= np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)

    def see(self, token: int) -> None:
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.failure = _in_one_line(self._matcher.get_error()) or "the grammar refused a token"

    def mask(self) -> np.ndarray:
        if not self._matcher.is_stopped():
            mask_W = np.zeros_like(self._only_eos_W)
            self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if self._matcher.is_error():
                self.failure = _in_one_line(self._matcher.get_error())
            elif mask_W.any():
                return mask_W
        return self._only_eos_W


def _in_one_line(error: str) -> str:
    """llguidance's message without its state, which follows in further lines."""
    return " ".join(error.partition("<state>")[0].split())[:200]
