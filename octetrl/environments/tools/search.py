"""A search tool over the user's corpus: it finds passages by BM25, which prefers rare words of the query.

    *.jsonl      a passage a line: {"text": "...", "title": "..."}; `title` may be missing
    a folder     its *.txt and *.md files, at any depth, cut into passages
    other files  text, cut likewise

Text is cut at blank lines, and paragraphs are joined up to 150 words; the title is the file's name. The package bm25s
(extra `search`) ranks the passages by Lucene's BM25 over words in lower case. There is no stemming, so it is easy to
see why a passage was found. The index is built once, with the tool. It needs about 4 bytes of memory for each word of
the corpus, and 4 more for the first occurrence of each word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from octetrl.environments.tools.definition import Tool, ToolError
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json, read_text

_WORD = re.compile(r"\w+")
_PASSAGE_WORDS = 150
_SUFFIXES = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Passage:
    text: str
    title: str = ""


class Corpus:
    """Passages with a search index. Raises UserError if there are no passages or bm25s is not installed."""

    def __init__(self, passages: Iterable[Passage], *, name: str = "corpus") -> None:
        try:
            import bm25s
        except ImportError:
            raise UserError(
                f"{name}: search needs bm25s, which is not installed; pip install 'octetrl[search]'"
            ) from None
        self.passages: Sequence[Passage] = tuple(passages)
        words = [words_of(f"{passage.title} {passage.text}") for passage in self.passages]
        if not any(words):
            raise UserError(f"{name}: there are no words in it to search for; give passages of text")
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, query: str, results: int) -> list[Passage]:
        """The best passages, best first; fewer than `results` if fewer contain a word of the query."""
        words = words_of(query)
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = sorted((place for place in range(len(scores)) if scores[place] > 0), key=lambda place: -scores[place])
        return [self.passages[place] for place in best[:results]]


def search_tool(
    corpus: str | Path | Corpus,
    *,
    name: str = "search",
    description: str = "Search a collection of documents and read the passages that fit best.",
    results: int = 3,
    max_letters: int = 1000,
) -> Tool:
    """A tool that finds up to `results` passages of `corpus`, each cut at `max_letters`."""
    corpus = corpus if isinstance(corpus, Corpus) else Corpus(read_passages(corpus), name=str(corpus))
    return Tool(_Search(corpus, results, max_letters), name=name, description=description)


@dataclass(frozen=True, slots=True)
class _Search:
    corpus: Corpus
    results: int
    max_letters: int

    def __call__(
        self, query: Annotated[str, Field(description="What to look for: a few words, the rarer the better.")]
    ) -> str:
        if not words_of(query):
            raise ToolError("the query has no words; give what to look for")
        passages = self.corpus.search(query, self.results)
        if not passages:
            return f"Nothing in the collection has any word of '{query[:100]}'. Try other words."
        shown = (_shown(passage, self.max_letters) for passage in passages)
        return "\n\n".join(f"[{place}] {text}" for place, text in enumerate(shown, 1))


def read_passages(path: str | Path) -> list[Passage]:
    """Read the passages at `path`. Raises UserError, naming file and line, if something can't be read."""
    path = Path(path)
    if path.suffix == ".jsonl":
        return list(_jsonl_passages(path))
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"{path}: the folder has no {' or '.join(_SUFFIXES)} files; give some, or a JSONL file")
        return [passage for file in files for passage in _cut(_read(file), file.stem)]
    return _cut(_read(path), path.stem)


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _jsonl_passages(path: Path) -> Iterator[Passage]:
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}:{number}", "each line is one JSON object")
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f'{path}:{number}: no "text" that is a string; a line is {{"text": ..., "title": ...}}')
        yield Passage(row["text"], str(row.get("title") or ""))


def _read(path: Path) -> str:
    return read_text(path, "give a JSONL file or a text file in UTF-8, or a folder of them", encoding="utf-8-sig")


def _cut(text: str, title: str) -> list[Passage]:
    passages: list[list[str]] = []
    room = 0
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        for start in range(0, len(words), _PASSAGE_WORDS):
            piece = words[start : start + _PASSAGE_WORDS]
            if len(piece) > room:
                passages.append([])
                room = _PASSAGE_WORDS
            passages[-1].append(" ".join(piece))
            room -= len(piece)
    return [Passage("\n".join(parts), title) for parts in passages]


def _shown(passage: Passage, letters: int) -> str:
    text = f"{passage.title}: {passage.text}" if passage.title else passage.text
    return text if len(text) <= letters else f"{text[:letters]}..."
