"""Which lines the study's table and runner accept: of one table, with equal settings, whole, and once for each run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.command import run_command
from benchmarks.study import job, lines, runs, table
from octetrl.system.errors import UserError
from tests.house.figures import check_table
from tests.house.markdown import tables
from tests.house.tree import REPO
from tests.unit.benchmarks.test_study_runs import line_of

RESULTS = [path for path in sorted((REPO / "benchmarks/results").glob("study_*.json")) if '"lines"' in path.read_text()]
MARKERS = "<!-- study: tiny-sums -->\n<!-- study: end -->\n"


def settled(arm: str, seed: int, end: float = 0.8, **changed: Any) -> dict[str, Any]:
    return line_of(arm, seed, end) | {"changes": [], "of_steps": 30} | changed


def write(state: Path, *given: dict[str, Any]) -> None:
    for line in given:
        job.write_line(job.line_path(state, line["table"], line["arm"], line["seed"]), line)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def refused(main: Callable[[list[str]], None], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_command("study", lambda: main(words))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


def test_lines_of_other_settings_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (changed, why) in enumerate(
        (
            (
                {"changes": ["trainer.optimizer.lr=1e-3"]},
                "with no changes, .* with the changes trainer.optimizer.lr=1e-3",
            ),
            ({"of_steps": 45}, "bf16, seed 0 was trained with 30 steps, fp8, seed 0 with 45 steps"),
        )
    ):
        state = tmp_path / str(number)
        write(state, settled("bf16", 0), settled("fp8", 0, **changed))
        with pytest.raises(UserError, match=why):
            table.read_lines(state, "tiny-sums")
        assert len(table.read_lines(state, "tiny-sums", "bf16")) == 1, "an arm alone"
    path = table.save("x", [settled("bf16", 0)], tmp_path)
    with pytest.raises(UserError, match=r"--join: .* was trained with 30 steps"):
        table.joined([settled("bf16", 0), settled("fp8", 0, of_steps=45)], path)
    one, other = ["a.b=1", "c=2"], ["c=2", "a.b=1"]
    lines.refuse_mixed([settled("bf16", 0, changes=one), line_of("fp8", 0, 0.7), settled("fp8", 1, changes=other)], "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "--change steps=7",
            "'lines/tiny-sums-bf16-9.json' was trained with no changes, this command gives the changes",
        ),
        ("", "'lines/tiny-sums-bf16-9.json' was trained with 30 steps, this command gives 45 steps"),
    ],
)
def test_the_runner_refuses_a_state_of_other_settings(
    words: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: pytest.fail("a job was started"))
    write(tmp_path / "state", settled("bf16", 9))
    given = ["tiny-sums", "--arms", "bf16", "--seeds", "1", *words.split()]
    with pytest.raises(UserError, match=f"--state: {why}"):
        runs.main([*given, "--state", str(tmp_path / "state")])
    runs.pack(tmp_path / "state", tmp_path / "packed", limit_mb=1, piece_mb=1)
    with pytest.raises(UserError, match=f"--unpack: {why}"):
        runs.main([*given, "--state", str(tmp_path / "new"), "--unpack", str(tmp_path / "packed")])
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: None)
    write(tmp_path / "state", settled("bf16", 9, of_steps=45))
    runs.main(["tiny-sums", "--arms", "bf16", "--seeds", "1", "--state", str(tmp_path / "state")])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_is_rendered_and_joined(path: Path, tmp_path: Path) -> None:
    name, earlier = path.stem.removeprefix("study_"), json.loads(path.read_text())
    (of_table,) = {line["table"] for line in earlier["lines"]}
    shutil.copy(path, tmp_path)
    words = [of_table, "--name", name, "--out", str(tmp_path), "--pictures", str(tmp_path)]
    table.main([*words, "--render"])
    rendered = json.loads((tmp_path / path.name).read_text())
    assert rendered["lines"] == earlier["lines"]
    assert [row["end/accuracy"] for row in rendered["rows"]] == [row["end/accuracy"] for row in earlier["rows"]]
    head = {field: value for field, value in earlier.items() if field not in ("rows", "lines")}
    write(tmp_path, *(line | {"from": head} for line in earlier["lines"] if line["seed"] == 0))
    table.main([*words, "--state", str(tmp_path), "--join", str(path)])
    assert json.loads((tmp_path / path.name).read_text())["lines"] == earlier["lines"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_text(path.read_text()[:40]), "'lines/tiny-sums-bf16-0.json': not JSON"),
        (lambda path: path.write_bytes(b"\xff"), "'lines/tiny-sums-bf16-0.json': not UTF-8"),
        (lambda path: path.write_text("[1]"), "'lines/tiny-sums-bf16-0.json': not an object"),
        (lambda path: path.write_text('{"x": 1}'), "'lines/tiny-sums-bf16-0.json': 'table' is None"),
        (lambda path: shutil.copy(path, path.with_stem("tiny-sums-bf16-00")), "bf16-00.json' are both of bf16, seed 0"),
        (
            lambda path: path.rename(path.with_stem("tiny-sums-bf16-5")),
            "bf16-5.json' is the line of 'tiny-sums-bf16-0'",
        ),
    ],
    ids=["cut", "bytes", "list", "foreign", "twice", "renamed"],
)
def test_a_wrong_file_of_a_line_is_named(
    damage: Callable[[Path], Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "state", settled("bf16", 0), settled("fp8", 0))
    damage(job.line_path(tmp_path / "state", "tiny-sums", "bf16", 0))
    before = files(tmp_path)
    words, out = ["tiny-sums", "--state", str(tmp_path / "state")], str(tmp_path / "out")
    assert why in refused(table.main, [*words, "--out", out, "--pictures", out], capsys)
    assert why in refused(runs.main, [*words, "--arms", "bf16", "--seeds", "1"], capsys)
    assert files(tmp_path) == before


@pytest.mark.parametrize("field", ["start/accuracy", "end/accuracy", "end/accuracy_bf16", "seconds", "curve"])
def test_what_is_not_a_number_is_refused_by_name(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path, settled("bf16", 0), settled("fp8", 3, **{field: [[15, math.nan]] if field == "curve" else math.nan})
    )
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    said = refused(table.main, words, capsys)
    assert f"'lines/tiny-sums-fp8-3.json': '{field}' is " in said and "nan" in said


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seconds": 10**400}, "'seconds' is 1000000"),
        ({"end/accuracy": 10**400}, "'end/accuracy' is 1000000"),
        ({"end/accuracy": 1.5}, "'end/accuracy' is 1.5, a number from 0 to 1 is needed"),
        ({"start/accuracy": -0.1}, "'start/accuracy' is -0.1, a number from 0 to 1"),
        ({"start/accuracy_bf16": 2}, "'start/accuracy_bf16' is 2, a number from 0 to 1"),
        ({"curve": [[10**400, 0.5]]}, "'curve' is [[1000000"),
        ({"curve": [[15, 1.5]]}, "'curve' is [[15, 1.5]]"),
        ({"curve": [[30, 0.5], [15, 0.6]]}, "'curve' is [[30, 0.5], [15, 0.6]], a list of rising steps"),
        ({"commit": ""}, "'commit' is '', the name of a commit is needed"),
        ({"from": {"commit": ""}}, "'from.commit' is '', the name of a commit is needed"),
        ({"from": {"benchmarks_digest": ["0"]}}, "'from.benchmarks_digest' is ['0'], a text is needed"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_figures_that_no_run_has_are_refused_by_name(
    changed: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = settled("bf16", 0)
    write(tmp_path, line | changed | {"from": line["from"] | changed.get("from", {})})
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    assert f"'lines/tiny-sums-bf16-0.json': {why}" in refused(table.main, words, capsys)
    path = table.save("tiny-sums", [line], tmp_path)
    found = json.loads(path.read_text())
    in_result, said = ({"commit": ""}, "'commit' is ''") if "from" in changed else ({"lines": [line | changed]}, why)
    path.write_text(json.dumps(found | in_result))
    assert said in refused(table.main, [*words, "--render"], capsys)


def test_two_lines_of_a_run_in_a_result_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table.save("tiny-sums", [settled("bf16", 0), settled("bf16", 0, end=0.9)], tmp_path)
    write(tmp_path, settled("bf16", 0))
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    for option in (["--render"], ["--join", str(path)]):
        assert "two lines are of bf16, seed 0" in refused(table.main, [*words, *option], capsys)


def test_lines_of_an_unknown_arm_are_left_out_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, settled("bf16", 0), settled("fp9", 0), settled("fp9", 1))
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    table.main(words)
    assert "--state: left out 2 lines of 'fp9', no arm of the study" in capsys.readouterr().err
    path = tmp_path / "study_tiny-sums.json"
    found = json.loads(path.read_text())
    assert [row["arm"] for row in found["rows"]] == ["bf16"] and len(found["lines"]) == 1
    path.write_text(json.dumps(found | {"lines": [*found["lines"], settled("fp9", 0)]}))
    for option in ("--render", "--join"):
        table.main([*words, option] if option == "--render" else [*words, option, str(path)])
        assert f"{option}: left out 1 line of 'fp9'" in capsys.readouterr().err


def test_only_arms_of_several_commits_have_a_dagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(line: dict[str, Any], commit: str, digest: str) -> dict[str, Any]:
        return line | {"from": line["from"] | {"commit": commit, "source_digest": digest}}

    write(
        tmp_path,
        *(measured(settled("bf16", seed), "1" * (9 - seed), "a") for seed in (0, 1)),  # one commit, 9 and 8 digits
        *(measured(settled("fp8", seed), f"2{seed}", f"b{seed}") for seed in (0, 1)),
        measured(settled("fp8_full", 0), "333-dirty", "c"),
    )
    document = tmp_path / "study.md"
    document.write_text(MARKERS)
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    words += ["--document", str(document)]
    table.main(words)
    found = json.loads((tmp_path / "study_tiny-sums.json").read_text())
    assert record.is_dirty(found) and [row["dirty"] for row in found["rows"]] == [False, True, True]
    assert {(line["commit"], line["dirty"]) for line in found["lines"] if line["arm"] == "fp8_full"} == {("333", True)}
    for option in ([], ["--render"]):
        table.main([*words, *option])
        text = document.read_text()
        assert "| `bf16` |" in text and "| `fp8` † |" in text and "| `fp8_full` † |" in text
        (shown,) = tables(text)
        check_table(shown, found["rows"])
    for line in found["lines"]:  # as in a result from before lines had commits
        del line["commit"]
    (tmp_path / "study_tiny-sums.json").write_text(json.dumps(found))
    table.main([*words, "--render"])
    assert document.read_text().count("` † |") == 3
    assert "dirty" not in json.loads((tmp_path / "study_tiny-sums.json").read_text())["rows"][0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--render --name ghost", "study_ghost.json: no such file"),
        ("--join {tmp}/nofile", "--join: .*nofile: no such file"),
        ("--join {tmp}/text", "--join: .*text: not JSON"),
        ("--join {tmp}/list.json", "--join: .*list.json: it contains a list, an object is needed"),
        ("--join {tmp}/empty.json", "--join: .*empty.json': 'commit' is None"),
        ("--document {tmp}/nofile", "--document: .*nofile: no such file"),
        ("--document {tmp}/text", "--document: it has no lines"),
        ("--out /proc/x", "--out: cannot write in '/proc/x'"),
        ("--pictures {tmp}/text", "--pictures: cannot write in '.*text'"),
        ("--name ../../evil", r"--name: '\.\./\.\./evil' is no name of a result"),
        ("--name=", "--name: '' is no name"),
        ("--name folder", "--out: '.*study_folder.json' is a folder"),
    ],
)
def test_wrong_arguments_of_the_table_are_one_line_and_write_nothing(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "state", settled("bf16", 0))
    (tmp_path / "out" / "study_folder.json").mkdir(parents=True)
    for name, text in (("text", "a text"), ("list.json", "[]"), ("empty.json", "{}")):
        (tmp_path / name).write_text(text)
    before = files(tmp_path)
    first = ["tiny-sums", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    first += ["--pictures", str(tmp_path / "new" / "pictures")]
    said = refused(table.main, [*first, *words.format(tmp=tmp_path).split()], capsys)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)
    assert files(tmp_path) == before


def test_runs_with_fewer_evaluations_than_a_curve_needs_have_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tiny-sums", "--state", str(tmp_path), "--out", str(tmp_path), "--pictures", str(tmp_path)]
    for curve in ([], [[15, 0.6]]):
        write(tmp_path, settled("bf16", 0, curve=curve, **{"start/accuracy": None}))
        table.main(words)
        assert capsys.readouterr().err == "no picture: no complete run of tiny-sums has two evaluations\n"
    assert not list(tmp_path.glob("*.svg")) and (tmp_path / "study_tiny-sums.json").exists()
    write(tmp_path, settled("bf16", 0, curve=[[15, 0.6]]))
    table.main(words)
    assert "<polyline" in (tmp_path / "study_tiny-sums.svg").read_text()
