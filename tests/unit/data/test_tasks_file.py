"""JSONL files of tasks, and errors that say which line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.environment import EnvironmentConfig
from octetrl.data.tasks import read_tasks
from octetrl.environments.math_answers import MathScorer
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.tasks import Taskset
from octetrl.run.environment import build_environment
from octetrl.system.errors import UserError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "tasks.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_becomes_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "1 + 2 {x}", "answer": 3, "level": "easy"}\r\n\n'
        '{"prompt": "caf\u00e9\u2028?", "answer": "oui", "id": "french"}\n{"prompt": "Say hello."}',
    )
    first, second, third = read_tasks(path, "Q: {prompt}")
    assert (first.id, first.prompt, first.answer, first.metadata) == ("1", "Q: 1 + 2 {x}", "3", {"level": "easy"})
    assert (second.id, second.prompt, second.answer) == ("french", "Q: café\u2028?", "oui")
    assert (third.id, third.answer) == ("4", None)


def test_tasks_of_a_file_are_drawn_and_scored(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f'{{"prompt": "say {n}", "answer": {n}}}\n' for n in range(10)))
    task = Taskset(read_tasks(path), eval_size=3, seed=0).next_batch(1)[0]
    assert ExactScorer()(task, str(task.answer)) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ('{"prompt": "a"}\n{"prompt": }', ":2: not JSON (Expecting value at column 12)"),
        ("[1]", ":1: a list, not an object"),
        ('{"promt": "a"}', ":1: no 'prompt'; 'promt' is not read; did you mean 'prompt'?"),
        ('{"text": "a", "answer": 1}', ":1: no 'prompt'; the line has text, answer"),
        ("{}", ":1: no 'prompt'; the line has no keys"),
        ('{"prompt": " "}', ":1: 'prompt' is an empty string"),
        ('{"prompt": 3}', ":1: 'prompt' is a number"),
        ('{"prompt": []}', ":1: 'prompt' is an empty list"),
        ('{"prompt": [{"role": "user", "content": 3}]}', ":1: 'prompt', message 1: 'content' is a number"),
        ('{"prompt": [{"role": "user", "content": " "}]}', ":1: 'prompt' is an empty string"),
        ('{"prompt": [{"role": "system", "content": "a"}, "b"]}', ":1: 'prompt', message 2 is a string"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}', "message 1, part 1 is 'image_url'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":1: 'messages' is an empty list"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            ":1: 'prompt' ends with a message of the assistant",
        ),
        ('{"prompt": "a", "tools": "add"}', ":1: 'tools': not JSON"),
        ('{"prompt": "a", "tools": "{}"}', ":1: 'tools' is an object"),
        ('{"prompt": "a", "tools": ["search"]}', ":1: 'tools', tool 1 is a string"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
            "message 1: 'tool_calls' must be a list of calls",
        ),
        ('{"prompt": "a", "chat_template_kwargs": true}', ":1: 'chat_template_kwargs' is a boolean"),
        ('{"prompt": "a", "answer": [1]}', ":1: 'answer' is a list"),
        ('{"prompt": "a", "answer": true}', ":1: 'answer' is a boolean"),
        ('{"prompt": "a", "id": 2}\n{"prompt": "b"}', ":2: id '2' is also the id of row 1"),
        (b'{"prompt": "\xff"}', "not UTF-8 text (byte 12)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_tasks(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="datasets"):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("0.00001", "0.00001"),
        ("1e-05", "0.00001"),
        ("1e20", "100000000000000000000"),
        ("3e8", "300000000"),
        ("3.0", "3"),
        ("-0.10", "-0.1"),
        ("6.626e-34", "0.0000000000000000000000000000000006626"),
        ("1.5e-300", "1.5e-300"),
        ("12345678901234567890", "12345678901234567890"),
        ("NaN", None),
        ("1e999", None),
        ("null", None),
    ],
)
def test_numbers_of_json_keep_their_value(tmp_path: Path, written: str, answer: str | None) -> None:
    (task,) = read_tasks(write(tmp_path, f'{{"prompt": "?", "answer": {written}}}'))
    assert task.answer == answer


def test_temperature_and_group_size_are_read_where_columns_names_them(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"prompt": "?", "t": 0.5, "n": 4.0, "group_size": "big"}\n{"prompt": "!", "t": null, "n": null}'
    )
    first, second = read_tasks(path, columns={"temperature": "t", "group_size": "n"})
    assert (first.temperature, first.group_size, first.metadata) == (0.5, 4, {"group_size": "big"})
    assert (second.temperature, second.group_size) == (None, None)
    assert {(task.temperature, task.group_size) for task in read_tasks(path)} == {(None, None)}


@pytest.mark.parametrize("name", ["temperature", "group_size"])
@pytest.mark.parametrize("written", ['"1"', "0", "-1", "1e6", "NaN", "true", "[]"])
def test_a_bad_temperature_or_group_size_names_row_and_column(tmp_path: Path, name: Any, written: str) -> None:
    path = write(tmp_path, f'{{"prompt": "?", "own": 2}}\n{{"prompt": "!", "own": {written}}}')
    with pytest.raises(UserError) as caught:
        read_tasks(path, columns={name: "own"})
    assert str(caught.value).startswith(f"{path}:2: 'own' is ") and "\n" not in str(caught.value)


def test_numbers_of_parquet_keep_their_value(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "prompt": pyarrow.array(["a", "b"]),
        "answer": pyarrow.array([0.1, 1e-7], pyarrow.float32()),
        "whole": pyarrow.array([3.0, 12.0]),
        "price": pyarrow.array(["18.90", "5.00"]).cast(pyarrow.decimal128(9, 2)),
        "half": pyarrow.array([0.1, 2.0], pyarrow.float16()),
        "deep": pyarrow.array([{"of": 0.7}, {"of": 2.5}], pyarrow.struct([("of", pyarrow.float32())])),
    }
    path = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    for column, answers in {
        "answer": ["0.1", "0.0000001"],
        "whole": ["3", "12"],
        "price": ["18.90", "5"],
        "half": ["0.1", "2"],
        "deep.of": ["0.7", "2.5"],
    }.items():
        assert [task.answer for task in read_tasks(path, columns={"answer": column})] == answers
    assert [task.metadata["deep"] for task in read_tasks(path)] == [{"of": 0.7}, {"of": 2.5}]


@pytest.mark.parametrize("answer", ['""', "null", "NaN", '"nan"', '"???"', '"\\\\frac{1"'])
def test_a_reference_of_mathematics_that_cannot_be_read_is_a_problem_of_its_row(tmp_path: Path, answer: str) -> None:
    rows = [("1", '"7"'), ("2", answer), ("3", '"\\\\frac{1}{2}"'), ("4", answer)]
    path = write(tmp_path, "".join(f'{{"prompt": "{prompt}", "answer": {value}}}\n' for prompt, value in rows))
    config = EnvironmentConfig(kind="math", dataset=str(path))
    with pytest.raises(UserError) as caught:
        build_environment(config)
    assert str(caught.value).startswith(f"{path}:2: ") and "4" in str(caught.value).partition("more rows")[2]
    judged = config.model_copy(update={"reward": "operator:contains"})
    assert len(build_environment(judged).tasks) == 4


GSM8K = {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,013"}
MATH = {"problem": "Half of $3$?", "level": "Level 1", "solution": "It is $3/2$, so \\boxed{\\frac{3}{2}}."}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it."}],
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": "9a9b"},
}


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answer", "right", "metadata"),
    [
        (GSM8K, {"columns": {"prompt": "question"}, "reference_marker": "####"}, "How many", "1,013", "1013", []),
        (MATH, {"columns": {"prompt": "problem", "answer": "solution"}}, "Half of", None, "1.5", ["level"]),
        (
            DAPO,
            {"columns": {"answer": "reward_model.ground_truth", "id": "extra_info.index"}},
            "Solve it.",
            "34",
            "$34.0$",
            ["data_source", "reward_model", "extra_info"],
        ),
    ],
)
def test_files_of_other_keys_are_read_and_scored(
    tmp_path: Path, row: Any, options: Any, prompt: str, answer: str | None, right: str, metadata: list[str]
) -> None:
    (task,) = read_tasks(write(tmp_path, json.dumps(row)), **options)
    assert task.prompt.startswith(prompt) and list(task.metadata) == metadata
    assert answer is None or task.answer == answer
    assert task.id == ("9a9b" if "id" in options["columns"] else "1")
    assert [MathScorer("####")(task, f"so #### {said}") for said in (right, "77")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"columns": {"prompt": "quesion"}},
            ":1: there is no 'quesion', which environment.columns names; did you mean",
        ),
        ({"columns": {"prompt": "question", "answer": "answer.text"}}, "no 'answer.text', which environment.columns"),
        (
            {"columns": {"prompt": "question"}, "reference_marker": "The answer:"},
            "no text after environment.reference_marker 'The answer:'",
        ),
    ],
)
def test_a_row_that_lacks_a_column_is_named(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tasks(write(tmp_path, json.dumps(GSM8K)), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 + 8 = ?"}]
VERL = {
    "data_source": "gsm8k",
    "prompt": ASKED,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "15"},
    "extra_info": {"split": "train", "index": 3},
}
TRL = {"prompt": ASKED, "completion": [{"role": "assistant", "content": "15"}], "difficulty": 2.5}
MESSAGES = {"messages": [*ASKED, {"role": "assistant", "content": "15"}], "chat_template_kwargs": {"x": True}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_rows_of_verl_and_trl_need_no_mapping(tmp_path: Path, kind: str) -> None:
    """Also where the format pads the objects of a column with the keys of other rows."""
    path = tmp_path / f"rows.{kind}"
    for row, answer in ((VERL, "15"), (TRL, None), (MESSAGES, None)):
        rows: list[dict[str, Any]] = [row, json.loads(json.dumps(row))]
        if "prompt" in row:
            rows[1]["prompt"] = [{"role": "user", "content": "?", "name": "anna"}]
        if kind == "jsonl":
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        elif kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
        first, second = read_tasks(path)
        assert list(map(dict, first.messages)) == ASKED and first.answer == answer
        assert second.messages[-1]["content"] == ("?" if "prompt" in row else "7 + 8 = ?")
        kept = {key for key in row if key not in ("prompt", "messages")}
        assert set(first.metadata) == kept
        assert first.chat_template_kwargs == row.get("chat_template_kwargs", {})


def test_rows_of_both_forms_in_one_parquet_file_have_their_answers(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": ASKED, "answer": "15"}, VERL, {"messages": MESSAGES["messages"], "answer": "15"}]
    keys = {key for row in rows for key in row}
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
    parquet.write_table(table, tmp_path / "rows.parquet")
    tasks = read_tasks(tmp_path / "rows.parquet")
    assert [task.answer for task in tasks] == ["15"] * 3 and len({task.problem for task in tasks}) == 1


def test_one_message_of_the_user_is_its_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "7 + "}, {"type": "text", "text": "8"}]
    for content in ("7 + 8", parts):
        (task,) = read_tasks(write(tmp_path, json.dumps({"prompt": [{"role": "user", "content": content}]})))
        assert task.prompt == "7 + 8"


def test_the_template_of_a_prompt_surrounds_the_last_question(tmp_path: Path) -> None:
    rows = json.dumps({"prompt": [ASKED[1], {"role": "assistant", "content": "15"}, ASKED[1]]})
    (task,) = read_tasks(write(tmp_path, rows), "Q: {prompt}")
    assert [message["content"] for message in task.messages] == ["7 + 8 = ?", "15", "Q: 7 + 8 = ?"]
