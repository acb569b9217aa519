"""Texts use plain technical English: phrases that readers stumbled over do not come back.

Each entry is a pattern, what to write instead, and a phrase that the pattern must find. The test searches docs/,
recipes, the package with its docstrings, comments and messages, the tests and the examples. `octetrl/fp8/` and
`octetrl/kernels/` were also read as a whole by these rules.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest

from tests.house.tree import REPO, text_files

SEARCHED = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/",
    "recipes/",
    "octetrl/",
    "examples/",
    "setup/",
    "lab/",
    "tests/",
)


class Phrase(NamedTuple):
    pattern: str
    instead: str
    example: str


PHRASES = (
    # The field's words instead of private ones.
    Phrase(r"[Rr]eckon", "extrapolated, computed", "learning reckoned from 66% of them"),
    Phrase(r"\banew\b", "again", "quantised anew"),
    Phrase(r"\b(?:[Gg]ive|[Gg]ives|given|gave|giving) back\b", "freed, released, returned", "the cache is given back"),
    Phrase(r"\beaten\b|\beater\b", "read by, consumed by; consumer", "what the next linear eater wants"),
    Phrase(r"\bstands at\b", "is", "the share stands at 5"),
    Phrase(r"\bbefalls?\b", "happens to", "whatever befalls a sequence"),
    Phrase(r"\bto be had\b|\bcan be had\b", "available", "the same bits are to be had without it"),
    Phrase(r"\bhears of\b", "is called after, receives", "`on_turn(round, turn)` hears of each"),
    Phrase(r"\btakes down one\b", "frees", "builds, measures and takes down one engine"),
    # Subject, verb, object.
    Phrase(r"\bbut for\b", "except", "FP8 on other GPUs, but for emulation"),
    Phrase(r"\bthat there (?:is|are) not\b", "an unknown ..., a missing ...", "an action that there is not is told"),
    Phrase(r"\b(?:is|are|can|will) so (?:be|found|read|noticed|seen)\b", "put the result first", "it is so found late"),
    Phrase(r"\b[Ww]hoever\b", "name the reader, the caller, the program", "for whoever writes a kernel"),
    Phrase(r"\bwhence\b|\bthereof\b|\bwhereof\b", "from which, of it", "the file whence it came"),
    # Say what a number is compared with.
    Phrase(r"\d\.\d+%? for \d+\.\d", "3.69%, against 3.64%", "its error is 3.69% for 3.64%"),
    Phrase(
        r"log-probs off the", "largest log-prob difference, engine - trainer", "engine's log-probs off the trainer's"
    ),
    # Idioms that the readers of the code did not know.
    Phrase(r"\b[Mm]ade again\b|\bmakes? again\b", "recomputed", "the logits are made again"),
    Phrase(r"\bat hand\b", "current, in flight, given", "fails the requests at hand"),
    Phrase(r"\bunder way\b", "running, in flight", "the call under way"),
    Phrase(r"\bin the place of\b", "instead of", "a smooth gate in the place of the clip"),
    Phrase(r"\bone upon the other\b", "one after another", "corrections, one upon the other"),
    Phrase(r"\bcome out again\b", "succeeded again", "until a completion has come out again"),
    Phrase(r"\bdraws? no rollouts\b", "samples no rollouts", "sft draws no rollouts"),
    Phrase(r"\bis no multiple\b", "is not a multiple", "a depth that is no multiple of 256"),
    # Citations point to files that exist.
    Phrase(r"numerics\.md", "docs/fp8.md §n", "see numerics.md §4"),
)


@cache
def searched() -> dict[str, str]:
    """What each file says, by path."""
    paths = [path for path in text_files() if path.startswith(SEARCHED) and path != "tests/house/test_words.py"]
    return {path: (REPO / path).read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase.example)
def test_no_text_says(phrase: Phrase) -> None:
    pattern = re.compile(phrase.pattern.replace(" ", r"\s+"))
    assert pattern.search(phrase.example), "the pattern does not find its own example"
    found = []
    for path, text in searched().items():
        found += [f"{path}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]!r}" for hit in pattern.finditer(text)]
    assert not found, f"write '{phrase.instead}' instead: {', '.join(found)}"


def test_the_texts_are_searched() -> None:
    paths = searched()
    assert "docs/fp8.md" in paths and "octetrl/engine/engine.py" in paths
