"""Shows each token of a completion as text, and marks tokens that deserve attention.

A letter outside ASCII may take several tokens of a byte-level vocabulary; it is shown with the last of them, the others
are empty. So the pieces are as many as the tokens, and together they are the decoded text.

A token is worth a look when the engine gave it little probability, or when trainer and engine disagree about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

UNLIKELY = 0.1  # probability
VERY_UNLIKELY = 0.01
DISAGREEMENT = 0.1  # of log-probs
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_LETTER = 8  # tokens


class Decodes(Protocol):
    def decode(self, token_ids: list[int], /) -> Any: ...


def token_pieces(tokenizer: Decodes, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, empty where a letter goes on."""
    pieces: list[str] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = str(tokenizer.decode(pending))
        if text.endswith(_BROKEN) and len(pending) < _LONGEST_LETTER:
            pieces.append("")
        else:
            pieces.append(text)
            pending = []
    if pending:
        pieces[-1] = str(tokenizer.decode(pending))
    return pieces
