"""Decides when a completion ends, and decodes its text.

A completion ends with EOS, with one of the request's stop token ids, when its text contains a stop string, or at its
length limit. The ending token stays in `token_ids`; the text ends before it, or before the stop string.

Stop strings are searched in decoded text, because a string has many tokenisations and may begin in the middle of a
token. Decoding token by token is wrong if one character spans tokens (UTF-8 bytes, joined by the tokenizer), or if a
token's text depends on its neighbour (a leading space). `TextStream` therefore decodes a window that begins at the last
clean boundary. It emits only what the new tokens added, and only when the text no longer ends in the replacement
character. The same windows occur often in a batch, so their texts are memoised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from octetrl.records import FinishReason

INCOMPLETE = "\ufffd"  # a decoder's output for an incomplete character
DECODE_CACHE_SIZE = 1 << 16

Decode = Callable[[tuple[int, ...]], str]


class Tokenizer(Protocol):
    """The interface that the engine needs of a tokenizer; transformers' tokenizers have it."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def decoder_of(tokenizer: Tokenizer) -> Decode:
    """A function tokens -> text, without special tokens and without clean-up of spaces."""

    def decode(token_ids: tuple[int, ...]) -> str:
        return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode


def memoised(decode: Decode) -> Decode:
    """Memoises a decoder for the short windows of `TextStream`; whole completions hardly repeat."""
    return lru_cache(maxsize=DECODE_CACHE_SIZE)(decode)


class TextStream:
    """Text that grows token by token and equals, at `finish`, the decoding of all tokens at once."""

    def __init__(self, decode: Decode) -> None:
        self.text = ""
        self._decode = decode
        self._window: tuple[int, ...] = ()  # tokens since the border before the last
        self._num_emitted = 0  # leading tokens of the window whose text is in `text`

    def push(self, token: int) -> None:
        self._window += (token,)
        emitted = self._decode(self._window[: self._num_emitted])
        text = self._decode(self._window)
        if len(text) > len(emitted) and not text.endswith(INCOMPLETE):
            self.text += text[len(emitted) :]
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)

    def finish(self) -> str:
        """The whole text, an unfinished last character included as the decoder shows it."""
        emitted = self._decode(self._window[: self._num_emitted])
        return self.text + self._decode(self._window)[len(emitted) :]


class StopStrings:
    """Watches one completion's text for the first of `stops`."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) - 1  # a match may begin this far before the new text
        self._stream = TextStream(decode)

    def found_after(self, token: int) -> bool:
        """Adds the next token. Returns whether the text now contains a stop string."""
        searched = len(self._stream.text)
        self._stream.push(token)
        start = max(0, searched - self._reach)
        return len(self._stream.text) > searched and self._first(self._stream.text, start) >= 0

    def cut_text(self) -> str:
        """The text before the first stop string, or the whole text without one."""
        text = self._stream.finish()
        end = self._first(text, 0)
        return text if end < 0 else text[:end]

    def _first(self, text: str, start: int) -> int:
        found = [at for at in (text.find(stop, start) for stop in self._stops) if at >= 0]
        return min(found, default=-1)


class Stopping:
    """Decides after each token of one completion. `limit`: largest number of tokens of prompt and completion
    together."""

    def __init__(self, stop_token_ids: frozenset[int], stops: Sequence[str], limit: int, decode: Decode) -> None:
        self.stop_token_ids = stop_token_ids
        self._limit = limit
        self._strings = StopStrings(stops, decode) if stops else None

    @property
    def watches_text(self) -> bool:
        """Whether every token must be checked, because a stop string may end with it."""
        return self._strings is not None

    def after(self, token: int, num_tokens: int) -> FinishReason | None:
        """Why the completion ends after `token`, the last of `num_tokens` of prompt and completion; None: continue."""
        if token in self.stop_token_ids:
            return FinishReason.STOP
        if self._strings is not None and self._strings.found_after(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self._limit else None

    def text_of(self, token_ids: Sequence[int], decode: Decode) -> str:
        """The text of a finished completion."""
        if self._strings is not None:
            return self._strings.cut_text()
        ended_by_token = token_ids[-1] in self.stop_token_ids
        return decode(tuple(token_ids[:-1] if ended_by_token else token_ids))
