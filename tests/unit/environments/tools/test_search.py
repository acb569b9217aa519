"""A corpus from files, ranked by BM25, as a tool."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path

import pytest

from octetrl.environments.tools import Tool, ToolError
from octetrl.environments.tools.search import Corpus, Passage, read_passages, search_tool
from octetrl.system.errors import UserError

ROWS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway. The winter is cold."},
    {"title": "Lima", "text": "Lima is the capital of Peru, and the desert is near."},
    {"text": "Gold melts at 1064 degrees."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pytest.importorskip("bm25s")
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    return path


def found(tool: Tool, query: str) -> str:
    return asyncio.run(tool.call({"query": query}))


def test_the_passage_with_the_rarest_words_comes_first(corpus: Path) -> None:
    tool = search_tool(corpus)
    assert found(tool, "What is the capital of Peru?").startswith("[1] Lima: Lima is the capital of Peru")
    assert found(tool, "capital Norway").splitlines()[0].startswith("[1] Oslo")
    assert found(tool, "GOLD 1064") == "[1] Gold melts at 1064 degrees."
    assert len(found(search_tool(corpus, results=1), "capital").split("\n\n")) == 1
    assert found(search_tool(corpus, max_letters=10), "gold") == "[1] Gold melts..."


def test_a_search_without_results_or_words_is_told(corpus: Path) -> None:
    tool = search_tool(corpus)
    assert found(tool, "zebra").startswith("Nothing in the collection has any word of 'zebra'")
    with pytest.raises(ToolError, match="has no words"):
        found(tool, "?!")


def test_the_tool_can_be_sent_to_another_process(corpus: Path) -> None:
    tool = search_tool(corpus, name="look_up")
    again: Tool = pickle.loads(pickle.dumps(tool))
    assert again.schema() == tool.schema() and found(again, "gold") == found(tool, "gold")


def test_a_folder_of_texts_is_cut_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "long.txt").write_text("\n\n".join(f"word{n} " * 100 for n in range(3)) + "\n\nshort\n")
    (tmp_path / "note.md").write_text("one\n\ntwo\n")
    (tmp_path / "picture.png").write_bytes(b"\x00")
    passages = read_passages(tmp_path)
    assert [passage.title for passage in passages] == ["long", "long", "long", "note"]
    assert passages[3] == Passage("one\ntwo", "note") and passages[2].text.endswith("\nshort")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"tex": "b"}', 'facts.jsonl:2: no "text" that is a string'),
        (b'{"text": "a"}\n\nnot json', "facts.jsonl:3: not JSON"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"text": " ?! "}', "there are no words in it"),
        (None, "no such file"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    pytest.importorskip("bm25s")
    path = tmp_path / "facts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        search_tool(path)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"pip install 'octetrl\[search\]'"):
        Corpus([Passage("a")])
