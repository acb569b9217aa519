"""Rows of every kind of file; Parquet and `datasets` where they are installed, and what is said where they are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.schema import DataSource
from octetrl.data.conversations import Dialogue
from octetrl.data.mixture import read_source
from octetrl.data.rows import read_rows, without_padding
from octetrl.data.tasks import read_tasks
from octetrl.environments.code_tests import read_tests
from octetrl.system.errors import UserError

RECORDS: list[dict[str, Any]] = [
    {"level": 2, "messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a"}]},
    {"messages": [{"role": "user", "content": "b", "name": "Bob"}, {"role": "assistant", "content": "c"}]},
]


def test_lines_count_from_one_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join([json.dumps(RECORDS[0]), "", json.dumps(RECORDS[1])]))
    assert [(row.number, row.where, row.record) for row in read_rows(path)] == [
        (1, f"{path}:1", RECORDS[0]),
        (3, f"{path}:3", RECORDS[1]),
    ]


def parquet_file(folder: Path, records: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "r.parquet"
    keys = {key: None for record in records for key in record}
    parquet.write_table(pyarrow.Table.from_pylist([keys | record for record in records]), path)
    return path


def test_parquet_rows_keep_their_values_and_without_padding_are_the_rows(tmp_path: Path) -> None:
    path = parquet_file(tmp_path, RECORDS)
    rows = list(read_rows(path))
    assert [without_padding(row.record) for row in rows] == RECORDS
    assert rows[1].record["level"] is None and all(row.is_padded for row in rows)
    assert [row.where for row in rows] == [f"{path}, row 1", f"{path}, row 2"]


def test_nulls_inside_the_values_of_tasks_stay(tmp_path: Path) -> None:
    """A linked list, and a test whose function returns None, beside tests of another form."""
    linked = {"val": 1, "next": {"val": 2, "next": None}}
    calls = [{"args": [1], "expected": None}, {"args": [2], "expected": 2}]
    records = [
        {"prompt": "p", "id": "a", "linked": linked, "tests": calls, "function": "f"},
        {"prompt": "q", "linked": {"val": 3, "next": None}, "tests": [{"stdin": "1", "stdout": "2"}]},
    ]
    first, second = read_tasks(parquet_file(tmp_path, records))
    assert (first.id, second.id) == ("a", "2")
    assert (first.metadata["linked"], second.metadata["linked"]) == (linked, {"val": 3, "next": None})
    assert (read_tests(first).form, read_tests(first).cases) == ("calls", tuple(calls))
    assert (read_tests(second).form, read_tests(second).cases) == ("programs", ({"stdin": "1", "stdout": "2"},))


def test_conversations_of_a_column_format_are_those_of_lines(tmp_path: Path) -> None:
    """Calls with different arguments, messages with different keys, rows of different forms, schemas of tools."""
    user = {"role": "user", "content": "?"}
    calls = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("add", {"a": 1, "b": 2}), ("say", {"text": "x"}))
    ]
    tools = [
        {"name": name, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}
        for name, key in (("add", "a"), ("say", "text"))
    ]
    records = [
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": calls}], "tools": tools},
        {"messages": [user, {"role": "assistant", "content": "a", "name": "Bo"}]},
        {"prompt": "p", "answer": "a"},
    ]
    lines = tmp_path / "r.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    of_columns, of_lines = (
        read_source("s", DataSource(path=str(path)), "conversations").examples
        for path in (parquet_file(tmp_path, records), lines)
    )
    assert of_columns == of_lines
    assert of_columns[0] == Dialogue(tuple(records[0]["messages"]), tools=tuple(tools))


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "r.parquet"
    with pytest.raises(UserError, match="no such file"):
        list(read_rows(path))
    path.write_text("{}")
    with pytest.raises(UserError, match=r"r\.parquet: not Parquet"):
        list(read_rows(path))


def test_a_value_that_python_does_not_have_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets, letters = arrow.py_buffer(b"\0\0\0\0\1\0\0\0"), arrow.py_buffer(b"\xff")
    path = tmp_path / "r.parquet"
    for column, reason in (
        (arrow.array([2**62], arrow.timestamp("us")), "date value out of range"),
        (arrow.array([1], arrow.timestamp("us", tz="No/Where")), "No"),
        (arrow.Array.from_buffers(arrow.string(), 1, [None, offsets, letters]), "can't decode byte 0xff"),
    ):
        parquet.write_table(arrow.table({"prompt": ["p"], "other": column}), path)
        with pytest.raises(UserError, match=rf"r\.parquet: Python can't hold a value of a column \(.*{reason}"):
            list(read_rows(path))


@pytest.mark.parametrize(
    ("package", "path", "extra"),
    [("pyarrow", "r.parquet", "parquet"), ("datasets", ".", "datasets"), ("datasets", "hf:o/n", "datasets")],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str, path: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    assert f"pip install 'octetrl[{extra}]'" in str(caught.value) and "\n" not in str(caught.value)


def test_saved_and_loadable_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for folder in ("one", "splits", "files"):
        rows = list(read_rows(tmp_path / folder))
        assert [without_padding(row.record) for row in rows] == RECORDS, folder
        assert rows[1].where == f"{tmp_path / folder}[train], row 2"
    assert [without_padding(row.record) for row in read_rows(tmp_path / "splits", split="test")] == RECORDS[1:]
    with pytest.raises(UserError, match="no split 'dev'; it has train, test"):
        list(read_rows(tmp_path / "splits", split="dev"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="datasets can't load it"):
        list(read_rows(tmp_path / "empty"))
