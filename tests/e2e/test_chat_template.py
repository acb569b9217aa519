"""`model.chat_template`: a file in place of the tokenizer's template, from training to export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.data.tokenizer import load_tokenizer
from octetrl.records import SamplingParams
from octetrl.run.export import export_run
from octetrl.run.generate import generate_text, load_standing_model
from tests.e2e.tiny_run import recipe_tree

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}: <tool_call>{name, arguments}</tool_call><|end|>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHANGES = {
    "environment.tools": ["calculator"],
    "environment.turns.max_turns": 2,
    "environment.reward": "tests.e2e.tiny_rewards:by_text",
    "steps": 1,
    "checkpoint.every": 1,
}


def test_a_model_that_cannot_use_tools_is_trained_with_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = recipe_tree(model, tmp_path / "run", CHANGES)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    assert run_command(["train", "r.yaml"]) == 2 and "rollout.tool_format" in capsys.readouterr().err
    for verb, text, problem in (
        ("check", None, "no file"),
        ("train", None, "no file"),
        ("check", "{% if", "fails"),
        ("train", " ", "empty"),
        ("train", "hello", "leaves out"),
    ):
        if text is not None:
            (tmp_path / "t.jinja").write_text(text)
        assert run_command([verb, "r.yaml", "model.chat_template=t.jinja"]) == 2
        said = capsys.readouterr()
        assert "model.chat_template: " in said.err + said.out and problem in said.err + said.out
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    assert run_command(["train", "r.yaml", "model.chat_template=t.jinja"]) == 0
    capsys.readouterr()
    own = load_tokenizer(model).chat_template
    (tmp_path / "t.jinja").write_text(TEMPLATE + " ")
    assert run_command(["train", "r.yaml", "model.chat_template=t.jinja", "--resume", "steps=2"]) == 2
    assert "chat_template (text)" in capsys.readouterr().err
    (tmp_path / "t.jinja").unlink()
    exported = export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    assert load_tokenizer(exported).chat_template == TEMPLATE != own
    served = load_standing_model(str(tmp_path / "run"), precision="bf16", cluster={"device": "cpu"})
    assert served.chat.prompt_text("7") == "[user]7<|end|>[assistant]"
    served.close()


def test_other_models_are_served_and_generate_with_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    file, cpu = str(tmp_path / "t.jinja"), {"device": "cpu"}
    served = load_standing_model(str(model), precision="bf16", cluster=cpu, chat_template=file)
    assert served.chat.prompt_text("7") == "[user]7<|end|>[assistant]"
    served.close()
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    own, other = (
        generate_text(str(model), ["7"], sampling, cluster=cpu, chat_template=each)[0][0] for each in (None, file)
    )
    assert own.logprobs != other.logprobs


def test_rows_of_generate_reach_the_template(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text(TEMPLATE + "{{ mood }}")
    tool = {"type": "function", "function": {"name": "f"}}
    asked = [{"role": "user", "content": "7"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "7"},
        {"prompt": asked},
        {"messages": asked},
        {"messages": asked, "tools": [tool]},
    ]
    rows.append({"prompt": "7", "chat_template_kwargs": {"mood": "!"}})
    command = ["generate", str(model), "--input", "rows.jsonl", "--max-new-tokens", "6", "--device", "cpu"]
    command += ["--chat-template", "t.jinja"]

    def completions(*given: dict[str, Any]) -> tuple[int, list[str], str]:
        Path("rows.jsonl").write_text("".join(json.dumps({**row, "n": 8}) + "\n" for row in given))
        code = run_command(command)
        out, err = capsys.readouterr()
        return code, [json.loads(line)["completion"] for line in out.splitlines()], err

    code, texts, _ = completions(*rows)
    several = [tuple(texts[first : first + 8]) for first in range(0, 40, 8)]
    each = [tuple(completions(row)[1]) for row in rows]
    assert code == 0 and len(several) == 5
    assert each[0] == each[1] == each[2] and len({each[0], each[3], each[4]}) == 3
    code, _, err = completions({"prompt": "7"}, {"prompt": "7", "chat_template_kwargs": {"moody": "!"}})
    assert code == 2 and "rows.jsonl:2: chat_template_kwargs: the chat template does not read 'moody'" in err
