"""Where in a completion the answer is.

One rule, stated in the recipe as `environment.answer_marker`:

    None         the whole completion
    "####"       the text after the last "####"
    "<answer>"   the text after the last "<answer>", up to "</answer>" (or the end, when it is not closed)

The last marker counts, since a model that corrects itself means its last word. White space around the answer
is dropped.
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


def with_marker(answer: str, marker: str | None) -> str:
    """`answer` written so that `extract_answer` finds it."""
    if marker is None:
        return answer
    return f"{marker}{answer}</{marker[1:]}" if re.fullmatch(r"<\w+>", marker) else f"{marker} {answer}"
