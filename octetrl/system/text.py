"""Encode any Python string as UTF-8, for files, terminals, tokenizers and hashes.

A Python string may contain half of a surrogate pair: from a JSON file ("\\ud800"), from a path that is not UTF-8, from
a reward's error. UTF-8 has no bytes for it, so a plain write raises. This module writes it as the six characters
`\\udXXX`. In a JSON file these are the string's own escape, so reading the file gives the same string again. Elsewhere
the escape is visible, as in `repr`.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPE = "backslashreplace"  # for `open(..., errors=ESCAPE)`


def to_utf8(text: str) -> bytes:
    """Encode any text as UTF-8."""
    return text.encode("utf-8", ESCAPE)


def escaped(text: str) -> str:
    """Return `text` with escapes for what UTF-8 cannot encode; nearly always `text` itself."""
    return text if text.isascii() else to_utf8(text).decode("utf-8")


def printable(text: str) -> str:
    """Return `text` with escapes for what a terminal would obey, such as its control characters, and line breaks."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def visible(text: str) -> str:
    """Return `text` with escapes for control characters, but tab and line break, and for marks that reverse the order
    of letters: a page would hide or obey them, and pass them on to a terminal when they are copied."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def counted(number: int, thing: str) -> str:
    """A number with its noun: `1 token`, `1,200 tokens`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def binary_size(num_bytes: int) -> str:
    """A size of memory: `1.97 MiB`, `23.54 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"


class TextTooLong(ValueError):
    """A text whose length alone shows that it has more than `limit` tokens. `tokens`: the fewest that it can have."""

    def __init__(self, characters: int, tokens: int, limit: int) -> None:
        self.tokens = tokens
        super().__init__(f"{characters:,} characters, so at least {tokens:,} tokens, more than {limit:,}")
