"""Decides when a completion ends, and decodes its text.

A completion ends with EOS, with one of the request's stop token ids, when its text contains a stop string, or at its
length limit. The ending token stays in `token_ids`; the text ends before it, or before the stop string.

Stop strings are searched in decoded text, because a string has many tokenisations and may begin in the middle of a
token. Decoding token by token is wrong if one character spans tokens (UTF-8 bytes, joined by the tokenizer), or if a
token's text depends on its neighbour (a leading space). `TextStream` therefore decodes a window that begins at the last
clean boundary. It emits only what the new tokens added, and only when no later token can change it: the text does not
end in the replacement character, and the last token is no byte. A byte-fallback decoder (Llama 2, Mistral, Phi-3) reads
a run of byte tokens as a whole: if the run is not UTF-8, each of its bytes becomes a replacement character, also a line
break that was one until then. The same windows occur often in a batch, so their texts are memoised.

A completion ends with the first token after which the text of all tokens so far contains a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from octetrl.records import FinishReason

_BYTE = re.compile("<0x[0-9A-F]{2}>")
INCOMPLETE = "\ufffd"  # a decoder's output for an incomplete character
DECODE_CACHE_SIZE = 1 << 16

Decode = Callable[[tuple[int, ...]], str]


class Tokenizer(Protocol):
    """The interface that the engine needs of a tokenizer; transformers' tokenizers have it."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class TextDecoder:
    """Tokens -> text. `byte_tokens`: the tokens of a byte-fallback vocabulary that stand for one byte."""

    def __init__(self, decode: Decode, byte_tokens: frozenset[int] = frozenset()) -> None:
        self._decode, self.byte_tokens = decode, byte_tokens

    def __call__(self, token_ids: tuple[int, ...]) -> str:
        return self._decode(token_ids)


def decoder_of(tokenizer: Tokenizer) -> TextDecoder:
    """A decoder without special tokens and without clean-up of spaces."""

    def decode(token_ids: tuple[int, ...]) -> str:
        return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()  # that of a server's text has none
    return TextDecoder(decode, frozenset(token for piece, token in vocabulary.items() if byte_of(piece) is not None))


def byte_of(piece: Any) -> int | None:
    """The byte that a piece of a byte-fallback vocabulary stands for; None for any other piece."""
    return int(piece[3:5], 16) if isinstance(piece, str) and _BYTE.fullmatch(piece) else None


def memoised(decoder: TextDecoder) -> TextDecoder:
    """Memoises a decoder for the short windows of `TextStream`; whole completions hardly repeat."""
    return TextDecoder(lru_cache(maxsize=DECODE_CACHE_SIZE)(decoder), decoder.byte_tokens)


class TextStream:
    """Text that grows token by token and equals, at `finish`, the decoding of all tokens at once."""

    def __init__(self, decode: TextDecoder) -> None:
        self.text = ""  # what no later token can change
        self._decode = decode
        self._window: tuple[int, ...] = ()  # tokens since the border before the last
        self._num_emitted = 0  # leading tokens of the window whose text is in `text`

    def push(self, token: int) -> None:
        self._window += (token,)
        new = self._new()
        if new and not new.endswith(INCOMPLETE) and self._ends_run(token):
            self.text += new
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)

    def so_far(self) -> str:
        """`text` and what follows it at present, without the replacement characters at its end."""
        return self.text + self._new().rstrip(INCOMPLETE)

    def finish(self) -> str:
        """The whole text, an unfinished last character included as the decoder shows it."""
        return self.text + self._new()

    def _new(self) -> str:
        """The window's text that is not in `text`."""
        emitted = self._decode(self._window[: self._num_emitted])
        return self._decode(self._window)[len(emitted) :]

    def _ends_run(self, token: int) -> bool:
        """Whether no run of bytes goes on after `token`. Special tokens, which have no text, do not end one."""
        return not self._decode.byte_tokens or (token not in self._decode.byte_tokens and self._decode((token,)) != "")


class StopStrings:
    """Watches one completion's text for the first of `stops`."""

    def __init__(self, stops: Sequence[str], decode: TextDecoder) -> None:
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) - 1  # a match may begin this far before the new text
        self._stream = TextStream(decode)

    def found_after(self, token: int) -> bool:
        """Adds the next token. Returns whether the text now contains a stop string."""
        start = max(0, len(self._stream.text) - self._reach)
        self._stream.push(token)
        return self._first(self._stream.so_far(), start) >= 0

    def cut(self, text: str) -> str:
        """The text before the first stop string, or all of it without one."""
        end = self._first(text, 0)
        return text if end < 0 else text[:end]

    def _first(self, text: str, start: int) -> int:
        found = [at for at in (text.find(stop, start) for stop in self._stops) if at >= 0]
        return min(found, default=-1)


class Stopping:
    """Decides after each token of one completion. `limit`: largest number of tokens of prompt and completion
    together."""

    def __init__(self, stop_token_ids: frozenset[int], stops: Sequence[str], limit: int, decode: TextDecoder) -> None:
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
        ended_by_token = token_ids[-1] in self.stop_token_ids
        text = decode(tuple(token_ids[:-1] if ended_by_token else token_ids))
        return text if self._strings is None else self._strings.cut(text)
