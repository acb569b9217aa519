"""`octetrl eval` and `octetrl generate` with a server's model: our own server around the tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.data.conversations import read_conversation
from tests.e2e.live_server import CONTEXT_LENGTH, Live, live_server
from tests.e2e.tiny_run import read_lines, recipe_tree
from tests.unit.environments.judge_double import judge_double

CHANGES = {
    "precision": "bf16",
    "evaluation.temperature": 0.0,
    "evaluation.samples": 1,
    "evaluation.right_from": 0.5,
    "rollout.stop": ["q"],
}


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    with live_server(model) as server:
        yield server


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", CHANGES)))
    return str(path)


def backend(live: Live, *more: str) -> list[str]:
    section = {"base_url": f"{live.url}/v1", "model": "tiny", "concurrency": "2"}
    fields = [f"engine.openai.{name}={value}" for name, value in section.items()]
    return ["engine.backend=openai", *fields, *more]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "rollouts" / "step_000000.jsonl")


def test_the_answers_and_scores_are_those_of_the_embedded_engine(
    live: Live, model: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", str(model), "-r", recipe, "--out", str(tmp_path / "own")]) == 0
    assert run_command(["eval", "-r", recipe, *backend(live), "--out", str(tmp_path / "served")]) == 0
    assert f"tiny at {live.url}/v1" in capsys.readouterr().out
    own, served = (rows_of(tmp_path / name) for name in ("own", "served"))
    assert len(own) == 4 and any(len(row["token_ids"]) > 1 for row in own)
    same = ("task_id", "token_ids", "logprobs", "text", "reward", "status", "finish_reason", "prompt_token_ids")
    assert [[row[name] for name in same] for row in served] == [[row[name] for name in same] for row in own]
    found = json.loads((tmp_path / "served" / "eval.json").read_text())
    assert found["models"][0]["target"] == f"tiny at {live.url}/v1"
    assert run_command(["rollouts", str(tmp_path / "served")]) == 0


def test_text_alone_has_the_same_scores_and_no_token_ids(live: Live, model: Path, recipe: str, tmp_path: Path) -> None:
    """Without stop strings and with the chat template on the server's side."""
    no_stop = "rollout.stop=[]"
    assert run_command(["eval", str(model), "-r", recipe, no_stop, "--out", str(tmp_path / "own")]) == 0
    words = backend(live, "engine.openai.answers=text", "model.path=nowhere", no_stop)
    assert run_command(["eval", "-r", recipe, *words, "--out", str(tmp_path / "served")]) == 0
    own, served = (rows_of(tmp_path / name) for name in ("own", "served"))
    for row, theirs in zip(own, served, strict=True):
        assert [theirs[name] for name in ("text", "reward", "status")] == [
            row[name] for name in ("text", "reward", "status")
        ]
        assert len(theirs["token_ids"]) == len(row["token_ids"]) and set(theirs["token_ids"]) <= {-1}
        assert theirs["logprobs"] == []
    assert run_command(["rollouts", str(tmp_path / "served"), "--html", str(tmp_path / "page.html")]) == 0


TALK = [  # an environment that replies
    "environment.kind=python",
    "environment.dataset=tests.e2e.tiny_turns:Talk",
    "environment.reward=null",
    "evaluation.right_from=0",
    'rollout.stop=["e", "a", "1"]',
]


def test_several_turns_are_joined_token_by_token(
    live: Live, model: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", str(model), "-r", recipe, *TALK, "--out", str(tmp_path / "own")]) == 0
    assert run_command(["eval", "-r", recipe, *TALK, *backend(live), "--out", str(tmp_path / "served")]) == 0
    own, served = (rows_of(tmp_path / name) for name in ("own", "served"))
    assert max(len(row.get("turns", ())) for row in own) > 1
    same = ("token_ids", "logprobs", "turns", "reward", "status")
    assert [[row.get(name) for name in same] for row in served] == [[row.get(name) for name in same] for row in own]
    capsys.readouterr()
    for verb in (["eval", "-r"], ["check", "--eval"]):
        assert run_command([*verb, recipe, *TALK, *backend(live, "engine.openai.answers=text")]) == 2
        assert "engine.openai.answers: text has no token ids, and the turns of this" in capsys.readouterr().err


def test_answers_that_failed_are_counted(
    model: Path, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if len(double.asked) == 3:
            return 400, '{"error": {"code": "context_length_exceeded"}}', {}
        choice = {"message": {"content": "7"}, "finish_reason": "stop"}
        return {"model": "m", "choices": [choice], "usage": {"completion_tokens": 2}}

    with judge_double(answer) as double:
        words = ["engine.backend=openai", f"engine.openai.base_url={double.url}", "engine.openai.model=m"]
        words += ["engine.openai.answers=text", "engine.openai.concurrency=1"]
        assert run_command(["eval", "-r", recipe, *words, "--out", str(tmp_path / "out")]) == 0
        double.asked.clear()
        assert run_command(["eval", "-r", recipe, *words, "environment.max_failure_share=0.1"]) == 1
    rows = rows_of(tmp_path / "out")
    assert sorted(row["status"] for row in rows) == ["generation_error", "scored", "scored", "scored"]
    (failed,) = [row for row in rows if row["status"] == "generation_error"]
    assert "context_length_exceeded" in failed["detail"] and failed["reward"] is None and failed["text"] == ""
    (metrics,) = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert metrics["eval/generation_error"] == 1 and metrics["eval/mean_length"] == 2
    assert "generation_error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["engine.openai.model=huge"], "the server has no 'huge'; its models are: tiny"),
        (["engine.openai.base_url=http://127.0.0.1:9/v1", "engine.openai.retries=0"], "the server cannot be reached"),
        (["engine.openai.base_url=http://me:key@host/v1"], "engine.openai.base_url: this is not an address"),
        (["engine.openai.api_key_variable=sk-12345"], "this is not the name of an environment variable"),
        ([f"model.context_length={CONTEXT_LENGTH + 1}"], f"set model.context_length to {CONTEXT_LENGTH}"),
        (["engine.openai.answers=text", "rollout.top_k=5"], "rollout.top_k: 5"),
    ],
)
def test_bad_input_is_one_line(
    live: Live, recipe: str, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", "-r", recipe, *backend(live, *words)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and "sk-12345" not in error


def test_a_run_is_not_named_beside_a_server_and_not_trained_with_it(
    live: Live, model: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", str(model), "-r", recipe, *backend(live)]) == 2
    assert "is given and engine.backend is openai; leave it out" in capsys.readouterr().err
    for verb in ("train", "check"):
        assert run_command([verb, recipe, *backend(live)]) == 2
        assert "grpo needs answers of the weights that it trains, with their log-probs" in capsys.readouterr().err
    assert run_command(["check", "--eval", recipe, *backend(live)]) == 0
    shown = capsys.readouterr().out
    assert f"tiny at {live.url}/v1" in shown and "measured: no weights" in shown and shown.endswith("no problems\n")
    assert "no effect with engine.backend: openai; the server has its own" in shown
    assert run_command(["check", "--eval", recipe, *backend(live, "engine.openai.api_key_variable=NO_SUCH_KEY")]) == 2
    assert "the environment variable NO_SUCH_KEY is not set; export NO_SUCH_KEY=" in capsys.readouterr().err
    assert run_command(["check", "--eval", recipe]) == 2
    assert "--eval: it checks an evaluation by a server" in capsys.readouterr().err
    assert run_command(["eval", "-r", recipe, "engine.backend=openai"]) == 2
    assert "give engine.openai.base_url and engine.openai.model" in capsys.readouterr().err


# ---------------------------------------------------------------- generate

SAID = (("user", "1 + 1 ="), ("assistant", "2"), ("user", "?"))
MESSAGES = [{"role": role, "content": text} for role, text in SAID]
GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"prompt": "1 + 2 =", "answer": "3", "id": 7}, {"messages": MESSAGES, "n": 2}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_generate_prints_what_the_model_says_here(
    live: Live, model: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for words in ([str(model)], ["tiny", "--base-url", f"{live.url}/v1", "--in-flight", "2"]):
        assert run_command(["generate", *words, "--input", prompts, *GREEDY]) == 0
        shown.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    here, there = shown
    assert len(here) == 3 and here[0]["id"] == 7
    assert there == here
    assert run_command(["generate", "tiny", "--base-url", f"{live.url}/v1", "-p", "1 + 2 =", *GREEDY]) == 0
    assert capsys.readouterr().out == here[0]["completion"] + "\n"


def test_lines_for_sft_are_read_as_conversations(live: Live, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that were cut are left out. The tiny model ends few of its answers, so several are drawn."""
    words = ["tiny", "--base-url", f"{live.url}/v1", "--input", prompts, "--max-new-tokens", "300", "-n", "6"]
    assert run_command(["generate", *words, "--for-sft"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows and (len(rows) == 8 or "answers were truncated and are left out" in err)
    for row in rows:
        read_conversation(row, "here")
        assert "n" not in row and ("prompt" not in row or (row["reference"], row["id"]) == ("3", 7))


@pytest.mark.parametrize(
    ("answer", "rc", "expected"),
    [
        (
            (400, '{"error": {"message": "the context is 128", "code": "context_length_exceeded"}}', {}),
            1,
            ["3 of 3 requests failed", "the context is 128; lower --max-new-tokens, or shorten the prompt"],
        ),
        ((302, "", {"Location": "https://there/v1"}), 2, ["--base-url: the server redirects", "https://there/v1"]),
        ({"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}, 1, ["3 of 3 answers were truncated"]),
        ({"choices": [{"message": {"content": "\n"}, "finish_reason": "stop"}]}, 1, ["3 of 3 answers were empty"]),
    ],
)
def test_lines_for_sft_that_cannot_be_had_say_why(
    answer: Any, rc: int, expected: list[str], prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(answer, dict):
        answer |= {"model": "m", "usage": {"completion_tokens": 2}}
    with judge_double(answer) as double:
        assert run_command(["generate", "m", "--base-url", double.url, "--input", prompts, "--for-sft"]) == rc
    out, err = capsys.readouterr()
    assert not out and all(one in err for one in expected) and "engine.openai" not in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--precision", "fp8"], "--precision: with --base-url no model is loaded here; leave it out"),
        (["--top-k", "3"], "top_k cannot be asked of engine.backend: openai with answers: text"),
        (["--api-key-variable", "sk-1"], "--api-key-variable: this is not the name of an environment variable"),
        (["--api-key-variable", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY is not set"),
        (["--for-sft"], "--for-sft: it writes the lines of --input"),
    ],
)
def test_options_that_do_not_fit(
    live: Live, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["generate", "tiny", "--base-url", f"{live.url}/v1", "-p", "hi", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_options_of_a_server_need_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--in-flight", "3"], ["--api-key-variable", "K"]):
        assert run_command(["generate", str(model), "-p", "hi", *words]) == 2
        assert f"{words[0]}: it is for a server; give its address as --base-url" in capsys.readouterr().err
