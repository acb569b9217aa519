"""`octetrl check` tries tasks, prompts and score, and refuses what would make a run do nothing or fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octetrl.run.tiny_model import save_tokenizer
from octetrl.run.tokenizer_process import TokenizerProcess
from octetrl.shapes.presets import preset_config
from tests.unit.cli.conftest import Check

RECIPE = """
model: {path: model, init: random}
rollout: {max_prompt_tokens: 32, max_new_tokens: 8}
environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 0, answer_marker: "=>"}
cluster: {device: cpu}
"""
REWARDS = """
import time
def length(task, text):
    return float(len(text))
def text(task, text):
    return text
def late(task, text):
    time.sleep(600)
def one(task): return 1.0
async def later(task, text): return 1.0
def picky(task, text):
    return 1.0 / len(text)
import pathlib
pathlib.Path("imported").write_text("")
def broken(task, text):
    return task.nothing
def equal(task, text): return 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "rewards_to_try.py").write_text(REWARDS)
    rows = [{"prompt": "a" * (10 * place + 1), "answer": "b"} for place in range(20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tokenizer(["b c"], folder / "model")
    (folder / "model/config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def check(check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(folder)
    return check


def test_it_shows_prompt_lengths_and_what_texts_are_worth(check: Check) -> None:
    """Prompts of 1, 11, ... 191 letters, a token each, and three tokens of the template."""
    code, out, err = check()
    assert (code, err) == (0, "")
    assert "prompts 20 tried: median 98 tokens, 99% at most 193; limit 32, 85% too long" in out
    assert "rollout.max_prompt_tokens=193 takes 99% of them" in out
    assert "reference answer reward 1 empty text reward 0 garbage reward 0" in out


@pytest.mark.parametrize("kind", ["jsonl", "math"])
def test_rows_need_no_answer_where_a_reward_is_named(kind: str, folder: Path, check: Check) -> None:
    (folder / "open.jsonl").write_text('{"prompt": "1", "solution": "2"}\n')
    of_file = (f"environment.kind={kind}", "environment.dataset=open.jsonl", "environment.answer_marker=null")
    assert check(*of_file)[0] == 2
    code, out, err = check(*of_file, "environment.reward=rewards_to_try:length")
    assert (code, err) == (0, "") and "empty text reward 0" in out


def test_functions_that_the_run_calls_are_named(check: Check) -> None:
    of = "function: 'rewards_to_try:length'"
    code, out, _ = check(f"environment.reward={{here: {{{of}}}, judge: {{{of}, max_concurrent: 2}}}}")
    assert code == 0 and "without judge: the run's process calls them" in out


def test_references_of_mathematics_that_cannot_be_read_are_refused(folder: Path, check: Check) -> None:
    rows = [("1", 0.00001), ("2", "US\\$5"), ("3", "\\[7\\]"), ("4", "\\text{(B)}")]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
    (folder / "sums.jsonl").write_text("".join(lines))
    changes = ["environment.kind=math", "environment.dataset=sums.jsonl"]
    for marker in ("=>", "null", "<answer>"):
        code, out, err = check(*changes, f"environment.answer_marker={marker}")
        assert (code, err) == (0, "")
        assert "reference answer reward 1 empty text reward 0 garbage reward 0" in out
    (folder / "sums.jsonl").write_text("".join(lines) + '{"prompt": "5", "answer": null}\n')
    code, _, err = check(*changes)
    assert code == 2 and "sums.jsonl:5" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.dataset=long.jsonl", "rollout.max_prompt_tokens: 32 is less than every prompt that was tried"),
        ("environment.eval_size=21", "environment.eval_size: 21 held-out tasks asked for, but there are only 20"),
        ("environment={dataset: tasks.jsonl, reward: 'rewards_to_try:late', reward_timeout_seconds: 0.2, kind: jsonl}",
         "reward_timeout: no reward after 0.2 s"),
    ],
)  # fmt: skip
def test_what_would_make_a_run_do_nothing_is_refused(override: str, says: str, folder: Path, check: Check) -> None:
    (folder / "long.jsonl").write_text('{"prompt": "%s", "answer": "b"}\n' % ("a" * 50))
    code, _, err = check(override)
    assert code == 2 and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("text", ["of type str, not a number", "text, rewards_to_try.py:5", "return a finite number"]),
        ("one", ["(one, rewards_to_try.py:9) takes (task), but is called with (task, completion_text)"]),
        ("broken", ["the score fails on every text that was tried", "AttributeError", "(rewards_to_try.py:16)"]),
    ],
)
def test_a_score_that_cannot_be_used_is_refused_by_name_and_line(reward: str, says: list[str], check: Check) -> None:
    code, _, err = check(f"environment.reward=rewards_to_try:{reward}")
    assert code == 2 and err.count("\n") == 1
    for said in ("environment.reward", *says):
        assert said in err


def test_a_score_that_fails_sometimes_or_never_differs_is_a_warning(check: Check) -> None:
    code, out, _ = check("environment.reward=rewards_to_try:picky")
    assert code == 0 and "empty text no reward, reward_error: ZeroDivisionError" in out
    assert "warning where the score fails, a rollout has no reward" in out
    code, out, _ = check("environment.reward=rewards_to_try:equal")
    assert code == 0 and "get the same reward; equal rewards teach nothing" in out


def test_quick_checks_come_first(folder: Path, check: Check) -> None:
    """What is wrong in names and sizes is said before a module of the user's is imported."""
    reward, kind = "environment.reward=rewards_to_try:length", ("environment.kind=python", "environment.eval_size=0")
    of_its_own = (*kind, "environment.dataset=rewards_to_try:length")
    for wrong in ("model.path=nowhere", "output_dir=r.yaml", "model.tokenizer=nowhere", "fp8.ignore=['*.none']"):
        for given in ((reward,), of_its_own) if wrong == "model.path=nowhere" else ((reward,),):
            (folder / "imported").unlink(missing_ok=True)
            code, out, err = check(*given, wrong)
            assert code == 2 and err.count("\n") == 1, err
            assert "not tried tasks, tokenizer and score" in out and not (folder / "imported").exists()
    assert check(reward)[0] == 0 and (folder / "imported").exists()


def test_the_process_of_the_tokenizer_ends_with_the_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # otherwise no process is needed
    with TokenizerProcess(folder / "model", None) as tokenizer:
        process = tokenizer._process
        assert process is not None and tokenizer.tool_format() is None
        worker = process.pid
        assert Path("/proc", str(worker)).exists()
    assert not Path("/proc", str(worker)).exists()


def test_it_needs_neither_torch_nor_transformers_in_its_own_process(folder: Path, check: Check) -> None:
    """Their import takes longer than all the rest. The process that loads the tokenizer instead counts the same."""
    program = (
        "import sys\n"
        "from octetrl.cli.main import run_command\n"
        "code = run_command(['check', 'r.yaml'])\n"
        "print(code, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert shown.stderr == "" and shown.stdout.endswith("no problems\n0 []\n")
    _, out, _ = check()
    assert out.split("rehearsal")[1] in " ".join(shown.stdout.split())
    (folder / "model/tokenizer.json").rename(folder / "kept.json")
    (folder / "model/tokenizer.json").write_text("{}")
    shown = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "kept.json").rename(folder / "model/tokenizer.json")
    assert shown.stdout.endswith("2 []\n") and shown.stderr.count("\n") == 1
    assert "tokenizer: 'model' cannot be loaded" in shown.stderr


def test_an_answer_that_the_chat_template_cannot_show_is_named_with_its_row(
    folder: Path, tmp_path: Path, check: Check
) -> None:
    user, thought = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nc\n</think>b"}
    rows = [[user, thought], [user, {"role": "assistant", "content": "b"}]]
    (folder / "cut.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    shutil.copytree(folder / "model", tmp_path / "r1")
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    opening = "{% if add_generation_prompt %}<think>\n{% endif %}"
    (tmp_path / "r1" / "chat_template.jinja").write_text(template + opening)
    changes = [f"model.tokenizer={tmp_path / 'r1'}", "algorithm={name: sft, conversations: cut.jsonl, batch_size: 2}"]
    code, _, err = check(*changes, "environment.dataset=null")
    assert code == 2 and err.count("cut.jsonl:") == 1 and "cut.jsonl:2: " in err, err


def test_it_shows_the_first_prompt_and_the_templates_variables(folder: Path, tmp_path: Path, check: Check) -> None:
    shutil.copytree(folder / "model", tmp_path / "thinking")
    closed = "{% if enable_thinking is defined and not enable_thinking %}CLOSED{% endif %}"
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + closed
    (tmp_path / "thinking" / "chat_template.jinja").write_text(template)
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    (folder / "asked.jsonl").write_text(json.dumps({"prompt": asked, "answer": "b"}) + "\n")
    changes = [f"model.tokenizer={tmp_path / 'thinking'}", "environment.dataset=asked.jsonl", "environment.eval_size=0"]
    code, out, err = check(*changes)
    assert (code, err) == (0, "") and 'first prompt "system:s;user:a;" ' in out and "enable_thinking: true (" in out
    code, out, err = check(*changes, "rollout.chat_template_kwargs.enable_thinking=false")
    assert (code, err) == (0, "") and 'first prompt "system:s;user:a;CLOSED" ' in out
    assert "enable_thinking: false by the recipe" in out
    code, _, err = check(*changes, "rollout.chat_template_kwargs.tokenize=false")
    assert code == 2 and err.count("\n") == 1 and "'tokenize'" in err


READS = "{% if think %}T{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        ({}, ["rollout.chat_template_kwargs.thnik=false"], "rollout.chat_template_kwargs: the chat template does not"),
        ({"chat_template_kwargs": {"thnik": True}}, [], "task '2': chat_template_kwargs"),
        ({"tools": [TOOL]}, [], "task '2': tools: the chat template reads none"),
        ({"chat_template_kwargs": {"think": True}}, ["rollout.chat_template_kwargs.think=false"], None),
    ],
)
def test_what_the_template_does_not_read_is_told(
    folder: Path, row: dict[str, Any], changes: list[str], said: str | None, check: Check
) -> None:
    (folder / "t.jinja").write_text(READS)
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "b", **row}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    code, _, err = check("environment.dataset=rows.jsonl", "model.chat_template=t.jinja", *changes)
    assert (code, err.count("\n")) == ((0, 0) if said is None else (2, 1))
    assert said is None or (said in err and ("thnik" not in err or "did you mean 'think'?" in err))


def test_rows_of_sft_too(folder: Path, check: Check) -> None:
    (folder / "t.jinja").write_text(READS)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": said}] * 80 + [{"messages": said, "tools": [TOOL]}]  # behind those that are rendered
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    changes = ["algorithm={name: sft, conversations: chats.jsonl}", "environment={}", "rollout={}", "precision=bf16"]
    code, _, err = check("model.chat_template=t.jinja", *changes)
    assert code == 2 and "chats.jsonl:81: tools: the chat template reads none" in err


def test_a_prompt_of_the_system_alone_is_warned_of(folder: Path, check: Check) -> None:
    row = {"prompt": [{"role": "system", "content": "Be brief."}], "answer": "b"}
    (folder / "alone.jsonl").write_text(json.dumps(row) + "\n")
    code, out, _ = check("environment.dataset=alone.jsonl")
    assert code == 0 and "task '1' has system messages alone" in out


def test_a_sample_shows_what_is_trained_on(folder: Path, check: Check) -> None:
    """The tokenizer has a token for each letter, and one for each of the template's three."""
    code, out, err = check("--sample", "rollout.system_prompt=be kind", "rollout.max_new_tokens=8")
    assert (code, err) == (0, "")
    read = out.partition("what the model reads, and what is trained on ")[2]
    assert read.startswith("context ") and "be kind" in read
    assert read.index("be kind") < read.index("<|assistant|> trained (the policy's answer, of at most 8 tokens)")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}] * 2
    (folder / "chats.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "cc"}) + "\n")
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    changes = ["algorithm={name: sft, conversations: chats.jsonl}", "environment={}", "rollout={}", "precision=bf16"]
    code, out, err = check("--sample", *changes, "environment.dataset=null", "model.chat_template=t.jinja")
    assert (code, err) == (0, "")
    user, opening = len("user:a") + 1, len("assistant:")
    turn = f"context {user + opening} user:a<|end|>assistant: trained 3 b⏎ <|end|>"
    assert (
        f"chats.jsonl:1: {2 * (user + opening + 3)} tokens, of which 6 are trained on {turn} {turn} no problems" in out
    )
    changes[0] = "algorithm={name: dpo, conversations: pairs.jsonl}"
    code, out, err = check("--sample", "3", *changes, "environment.dataset=null")
    assert (code, err) == (0, "")
    assert "pairs.jsonl:1, chosen: " in out and "trained 2 b<|end|> pairs.jsonl:1, rejected: " in out
    assert out.endswith("trained 3 cc<|end|> no problems")
