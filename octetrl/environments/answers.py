"""Finds the answer in a completion, by the recipe's `environment.answer_marker`:

    None         the whole completion
    "####"       the text after the last "####"
    "<answer>"   the text after the last "<answer>", up to "</answer>" (or the end, when it is not closed)

The last marker counts, because a model may correct itself. White space around the answer is removed.
"""

from __future__ import annotations

import re


def extract_answer(completion_text: str, marker: str | None) -> str | None:
    """The answer in `completion_text`; None when the marker does not occur. May be empty."""
    if marker is None:
        return completion_text.strip()
    _, found, answer = completion_text.rpartition(marker)
    if not found:
        return None
    if re.fullmatch(r"<\w+>", marker):
        answer = answer.partition(f"</{marker[1:]}")[0]
    return answer.strip()
