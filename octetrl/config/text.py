"""One rule for texts that UTF-8 cannot hold, wherever a text leaves the process: files, terminals, tokenizers, hashes.

A Python string may hold half of a surrogate pair: from a JSON file ("\\ud800"), from a path that is not UTF-8, from a
reward's error. UTF-8 has no bytes for it, so a plain write raises. Here it is written as the six letters `\\udXXX`. In
a JSON file these are the string's own escape, so reading the file gives the same string again. Elsewhere the escape is
visible, as in `repr`.
"""

from __future__ import annotations

ESCAPE = "backslashreplace"  # for `open(..., errors=ESCAPE)`


def to_utf8(text: str) -> bytes:
    """The bytes of any text."""
    return text.encode("utf-8", ESCAPE)


def escaped(text: str) -> str:
    """`text` as UTF-8 can hold it; nearly always `text` itself."""
    return text if text.isascii() else to_utf8(text).decode("utf-8")


class TextTooLong(ValueError):
    """A text that has more tokens than `limit`, seen by its length. `tokens`: it has at least so many."""

    def __init__(self, characters: int, tokens: int, limit: int) -> None:
        self.tokens = tokens
        super().__init__(f"{characters:,} characters, which are at least {tokens:,} tokens, more than {limit:,}")
