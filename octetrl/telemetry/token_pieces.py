"""Show each token of a completion as text, with thresholds for tokens to highlight.

In a byte-level vocabulary a character outside ASCII may take several tokens. The last of them shows the character, the
others are empty. There is one piece per token, and the joined pieces are the decoded text.

A token is highlighted if the engine gave it a low probability, or if trainer and engine disagree about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

UNLIKELY = 0.1  # probability
VERY_UNLIKELY = 0.01
DISAGREEMENT = 0.1  # difference of log-probs
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_LETTER = 8  # tokens


class Decodes(Protocol):
    def decode(self, token_ids: list[int], /) -> Any: ...


def token_pieces(tokenizer: Decodes, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token. It is empty if the character continues in the next token."""
    pieces: list[str] = []
    before: list[int] = []  # the last complete tokens: a piece may begin with a space only after others
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = str(tokenizer.decode([*before, *pending]))[len(str(tokenizer.decode(before))) :]
        if text.endswith(_BROKEN) and len(pending) < _LONGEST_LETTER:
            pieces.append("")
        else:
            pieces.append(text)
            before, pending = pending, []
    if pending:
        pieces[-1] = text
    return pieces
