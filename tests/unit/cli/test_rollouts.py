"""`octetrl rollouts`: columns, page and lines, and one line for whatever is wrong."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from octetrl.cli.main import run_command
from octetrl.cli.rollouts import RolloutsView, clean
from octetrl.run.tiny_model import save_tokenizer
from octetrl.telemetry.rollouts import Filter, select
from tests.unit.telemetry.sampled_rows import EVIL, Letters, write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return write_run(tmp_path / "run")


def printed(capsys: Capture, *arguments: str) -> str:
    assert run_command(["rollouts", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_siblings_stand_side_by_side(run: Path, capsys: Capture) -> None:
    text = printed(capsys, "run", "--step", "2")
    assert [line.split("──")[0].strip() for line in text.splitlines() if line.startswith("step")] == [
        "step 2  sum/easy  mean reward 0.750 of 2",
        "step 2  sum/2  mean reward 0.000 of 1",
    ]
    heads = [line for line in text.splitlines() if "tokens" in line]
    assert "#0 1.000  scored  9 tokens" in heads[0] and "#1 0.500  scored  12 tokens" in heads[0]
    assert "no reward  reward_error" in heads[1]
    assert "KeyError: 'x' (r.py:3)" in text and "answered 3" in text and "reference 3" in text
    assert "2 of 2 groups from 1 step" in text and "policy version" not in text
    assert "policy version 2, 3 from token 4" in printed(capsys, "run", "--step", "3")


def test_turns_and_components_are_shown(run: Path, capsys: Capture) -> None:
    text = printed(capsys, "run", "--text", "told you")
    for words in ("ask!", "tool: told you", "so 3", "right 1.000", "brevity -0.250"):
        assert words in text


def test_no_escape_sequence_reaches_the_terminal(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(capsys, "run", "--task", "talk")
    assert "\x1b" not in text and "\u202e" not in text
    assert "␛[31m" in text and "\\u202e" in text and "[bold]" in text
    assert clean("a\tb\nc\r\x07\x9b31m") == "a\tb\nc␍␇\\x9b31m"
    assert clean("\ud83d") == "\\ud83d"


def test_long_texts_show_head_and_tail(run: Path, capsys: Capture) -> None:
    text = printed(capsys, "run", "--text", "four", "--step", "1", "--letters", "6")
    assert "I g … 6 letters … OUR" in text
    assert "I guess FOUR" in printed(capsys, "run", "--text", "four", "--step", "1", "--letters", "0")


def test_unlikely_tokens_are_marked(run: Path) -> None:
    selection = select(run, Filter(text="told you"), None)
    selection.groups[0].rows[0].line["trainer_logprobs"] = [-0.1, -3.0, -6.0, -0.5, -0.1, -0.1, -0.1]  # type: ignore[index]
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system="standard", highlight=False)
    tokenizer = Letters("ask!so ")
    view = RolloutsView(
        console, Filter(), letters=0, pieces=lambda ids: [tokenizer.decode([token_id]) for token_id in ids]
    )
    view.show(selection)
    text = file.getvalue()
    assert "\x1b[33ms\x1b[0m\x1b[1;31mk\x1b[0m\x1b[4;7m!\x1b[0m" in text
    assert "trainer and engine differ by more than 0.1" in text


def test_json_lines_are_what_the_file_holds(run: Path, capsys: Capture) -> None:
    rows = [json.loads(line) for line in printed(capsys, "run", "--json", "--reward", ":0.5").splitlines()]
    assert [(row["step"], row["group"], row["sibling"], row["reward"]) for row in rows] == [
        *((1, 0, 1, 0.5), (1, 1, 0, 0.0), (2, 0, 1, 0.5), (2, 1, 0, 0.0)),
        *((3, 0, 1, 0.5), (3, 1, 0, 0.0), (3, 2, 1, -1.0)),
    ]
    assert rows[-1]["text"] == EVIL and len(rows[-1]["logprobs"]) == len(EVIL)


def test_a_page_says_when_it_has_no_tokens(run: Path, capsys: Capture) -> None:
    said = printed(capsys, "run", "--html", "r.html", "--limit", "2")
    assert said.startswith("wrote r.html: 2 of 7 groups, tokens unmarked (--tokens: 'run' has no checkpoint")
    assert '"pieces"' not in Path("r.html").read_text()


def test_a_page_has_the_tokens_of_the_runs_tokenizer(run: Path, capsys: Capture) -> None:
    save_tokenizer(["1 + 2 = 3"], run / "checkpoints" / "step_000003", vocab_size=300)
    assert printed(capsys, "run", "--html", "r.html") == "wrote r.html: 7 of 7 groups\n"
    assert '"pieces"' in Path("r.html").read_text()
    assert "tokens: below 10%" in printed(capsys, "run", "--tokens")
    assert '"pieces"' not in (printed(capsys, "run", "--html", "r.html", "--no-tokens") and Path("r.html").read_text())


def test_the_token_sequence_shows_what_was_trained_on(run: Path, capsys: Capture) -> None:
    save_tokenizer(["1 + 2 = 3"], run / "checkpoints" / "step_000003", vocab_size=300)
    path = run / "rollouts" / "step_000003.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    talk = next(row for row in rows if row["task_id"] == "talk")
    talk["advantage"] = 0.5
    rows[1]["advantage"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = printed(capsys, "run", "--sequence", "--text", "told you").splitlines()
    assert lines[0] == "step 3, talk #0: reward 1, advantage +0.500, 9 tokens"
    spans = [line.split()[:2] for line in lines if line.startswith(("  context", "  trained"))]
    assert spans == [["context", "1"], ["trained", "4"], ["context", "1"], ["trained", "3"]]
    talk["turns"][1]["is_fork"] = True
    assert "  trained " not in printed(capsys, "run", "--sequence", "--step", "2"), "a file without advantages"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = printed(capsys, "run", "--sequence", "--text", "told you")
    assert "5 tokens, sequence 1 of 2" in text and "4 tokens, sequence 2 of 2" in text
    left_out = printed(capsys, "run", "--sequence", "--step", "3", "--text", "FOUR")
    assert "not trained on" in left_out and "  sampled " in left_out and "  trained " not in left_out
    assert printed(capsys, "run", "--html", "r.html") and '"sequences":[[[false,' in Path("r.html").read_text()


def test_one_file_will_do(run: Path, capsys: Capture) -> None:
    shutil.copy(run / "rollouts" / "step_000002.jsonl", "step_000002.jsonl")
    assert "2 of 2 groups from 1 step" in printed(capsys, "step_000002.jsonl")
