"""The page holds what was selected, needs nothing else, and no text in it can become markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octetrl.records import RolloutStatus
from octetrl.system.text import visible
from octetrl.telemetry.rollout_page import rollout_page, token_pieces, write_page
from octetrl.telemetry.rollouts import Filter, Interval, select
from tests.byte_fallback import FIRST_BYTE, byte_fallback, id_of
from tests.unit.telemetry.sampled_rows import EVIL, Letters, line, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def data(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    content: dict[str, Any] = json.loads(text)
    return content


def test_it_holds_groups_and_filter(run: Path) -> None:
    wanted = Filter(
        steps=Interval(low=2), rewards=Interval(0, 1), statuses=frozenset({RolloutStatus.SCORED}), task="s", text="F"
    )
    content = data(rollout_page("my run", select(run, Filter(), 5), wanted))
    assert (content["title"], content["found"], len(content["groups"])) == ("my run", 7, 5)
    assert content["filter"] == {
        "steps": [2, None],
        "rewards": [0, 1],
        "statuses": ["scored"],
        "task": "s",
        "text": "F",
    }
    first = content["groups"][0]
    assert (first["step"], first["task"], first["prompt"], first["answer"]) == (1, "sum/easy", "What is sum/easy?", "3")
    assert [row["reward"] for row in first["rows"]] == [1.0, 0.5]
    failed = content["groups"][1]["rows"][1]
    assert (failed["reward"], failed["status"]) == (None, "reward_error")
    assert (failed["detail"], failed["trace"]) == ("KeyError: 'x' (r.py:3)", "Traceback ...\nKeyError: 'x'")
    turns = data(rollout_page("x", select(run, Filter(task="talk"), None), wanted))["groups"][0]["rows"][0]
    assert [(part["by"], part["text"]) for part in turns["said"]] == [
        ("model", "ask!"),
        ("tool", "told you"),
        ("model", "so 3"),
    ]
    assert turns["components"] == {"right": 1.0, "brevity": -0.25}
    easy = data(rollout_page("x", select(run, Filter(steps=Interval(low=3), task="easy"), None), wanted))
    assert [row["versions"] for row in easy["groups"][0]["rows"]] == ["policy version 2, 3 from token 4", ""]


def test_texts_stay_texts_and_the_page_needs_nothing_else(run: Path, tmp_path: Path) -> None:
    write_page(tmp_path / "r.html", EVIL, select(run, Filter(), None), Filter(text=EVIL))
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    content = data(page)
    assert content["title"] == content["filter"]["text"] == visible(EVIL)
    assert content["groups"][-1]["rows"][1]["said"][0]["text"] == visible(EVIL)
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert('x')</script>" not in page and "\x1b" not in page
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page
    page = rollout_page("x", select(run, Filter(), None), Filter())
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest""", page)
    assert "default-src 'none'" in page
    file = tmp_path / "step_000001.jsonl"
    file.write_text(json.dumps(line("a", 0, 1.0, "half a letter: \ud83d")) + "\n")
    write_page(tmp_path / "r.html", "x", select(file, Filter(), None), Filter())
    assert "\\ud83d" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_tokens_come_with_their_probability(run: Path) -> None:
    tokenizer = Letters("ask!so ")
    selection = select(run, Filter(task="talk", text="told"), None)
    selection.groups[0].rows[0].line["trainer_logprobs"] = [-0.1, -3.0, -5.0, -0.1, -0.1, -0.1, -0.1]  # type: ignore[index]
    content = data(rollout_page("x", selection, Filter(), lambda ids: token_pieces(tokenizer, ids)))
    first, _, last = content["groups"][0]["rows"][0]["said"]
    assert (first["pieces"], last["pieces"]) == (["a", "s", "k", "!"], ["s", "o", " "])
    assert first["logprobs"] == [-0.1, -3.0, -6.0, -0.1]
    assert first["apart"] == [0.0, 0.0, 1.0, 0.0] and last["apart"] == [0.0] * 3


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 🦑!", "🦑", ""])
def test_a_letter_of_several_tokens_is_shown_with_its_last(text: str) -> None:
    pieces = token_pieces(Bytes(), list(text.encode()))
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_pieces_keep_spaces_and_broken_letters_do_not_swallow_what_follows() -> None:
    """A byte-fallback decoder strips it from a token that is decoded alone."""
    tokens = [id_of("▁the"), id_of("▁a"), *(FIRST_BYTE + byte for byte in "🦊".encode()), id_of("b"), id_of("▁the")]
    pieces = token_pieces(byte_fallback(), tokens)
    assert pieces == ["the", " a", "", "", "", "🦊", "b", " the"]
    assert "".join(pieces) == byte_fallback().decode(tokens)
    pieces = token_pieces(Bytes(), [0xF0, 0x9F, *b"abc", 0xFF])
    assert len(pieces) == 6 and "".join(pieces).endswith("abc\ufffd")
