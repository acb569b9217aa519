"""Texts of single tokens, and the bytes that they stand for, as log-probs show them."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from octetrl.engine.stopping import INCOMPLETE, byte_of


class Speller:
    """Decodes tokens to text, special tokens included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of_one = lru_cache(maxsize=None)(self._of_one)  # of at most the whole vocabulary

    def __call__(self, token_ids: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def bytes_of(self, token: int) -> list[int]:
        """The UTF-8 of a token's text, or the bytes of a token that is only a part of a character."""
        text = self.of_one(token)
        if INCOMPLETE in text:
            (piece,) = self._tokenizer.convert_ids_to_tokens([token])
            byte = byte_of(piece)
            if byte is not None:
                return [byte]
            if isinstance(piece, str) and all(letter in self._bytes for letter in piece):
                return [self._bytes[letter] for letter in piece]
        return list(text.encode())

    def _of_one(self, token: int) -> str:
        """A token's text after another one: decoders drop the space at the start of a text."""
        first, both = self((token,)), self((token, token))
        return both[len(first) :] if both.startswith(first) and INCOMPLETE not in both else first

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The letters by which byte-level vocabularies write bytes: printable ones for themselves, the others in order
        from U+0100."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
