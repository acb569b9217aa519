"""What `eval`, `generate` and `export` print, and what they hand over."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from octetrl.cli.eval import report_table, reserved, write_folder
from octetrl.cli.generate import completions_text
from octetrl.cli.main import run_command
from octetrl.cli.output import whole_file
from octetrl.config.load import load_recipe
from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, SamplingParams, Task, Turn
from octetrl.system.errors import UserError
from octetrl.telemetry.eval_report import EvalReport, Scoring, differences
from octetrl.telemetry.sample_estimates import Estimate


def completion(text: str) -> Completion:
    return Completion((1, 2), (-0.5, -0.5), text, FinishReason.STOP, 0, "digest")


def replace_function(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Any) -> None:
    import octetrl.cli.verbs
    import octetrl.run

    package, stand_in = ModuleType("octetrl.run"), ModuleType(module)
    package.__path__ = octetrl.run.__path__  # its other modules are the real ones
    setattr(stand_in, name, function)
    monkeypatch.setitem(sys.modules, "octetrl.run", package)
    monkeypatch.setitem(sys.modules, module, stand_in)


def make_models(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Folders in `folder`, the new working directory, that look like models: a missing one is refused early."""
    monkeypatch.chdir(folder)
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").touch()


def report(*rewards: float | None, length: int = 2) -> EvalReport:
    """Of one task, a completion each reward; None: the reward raised."""
    task = Task("a", "?")
    turn = Turn((1,), Completion((5,) * length, (-0.5,) * length, "x", FinishReason.STOP, 0, "digest"))
    rollouts = [
        Rollout(task, (turn,), RolloutStatus.REWARD_ERROR if reward is None else RolloutStatus.SCORED, reward)
        for reward in rewards
    ]
    return EvalReport([RolloutGroup(task, tuple(rollouts))], Scoring(ks=(1, 2)), 1234.5)


def rows(reports: dict[str, EvalReport]) -> dict[str, list[str]]:
    """The table's cells by their label."""
    first, *others = reports
    compared = {other: differences(reports[other], reports[first]) for other in others}
    file = io.StringIO()
    Console(file=file, width=200).print(report_table(reports, compared))
    lines = [re.split(r" {2,}", line.strip()) for line in file.getvalue().splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def test_a_report_shows_accuracy_and_every_status() -> None:
    cells = rows({"runs/x": report(1.0, 0.0, 1.0, None)})
    assert cells["accuracy"] == ["0.6667 [0.017, 0.992]"]
    assert cells["pass@2"] == ["1.0000 [0.207, 1.000]"]
    assert (cells["scored"], cells["reward_error"], cells["tokens/s"]) == (["3"], ["1"], ["1,234"])
    assert (cells["mean length"], cells["truncated"]) == (["2"], ["0 (0.0%)"])
    assert rows({"x": report(None)})["accuracy"] == ["none: no completion could be scored"]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.1, 0.3, "+0.2000 [+0.100, +0.300] *"),
        (-0.3, -0.1, "-0.2000 [-0.300, -0.100] *"),
        (-0.1, 0.1, "+0.0000 [-0.100, +0.100]"),
    ],
)
def test_a_difference_is_marked_if_its_interval_excludes_zero(low: float, high: float, shown: str) -> None:
    difference = Estimate((low + high) / 2, low, high, 2)
    table = report_table({"a": report(1.0), "b": report(1.0)}, {"b": {"accuracy": difference}})
    assert shown in [str(cell) for cell in table.columns[3].cells]


def test_reports_stand_side_by_side_with_their_difference() -> None:
    cells = rows({"runs/a": report(1.0, 0.0), "runs/b[bold]": report(1.0, 1.0, length=4), "c": report(0.0, 1.0)})
    assert cells["a"] == ["b[bold]", "less the first", "c", "less the first"]
    assert cells["accuracy"] == [
        "0.5000 [0.012, 0.988]",
        "1.0000 [0.207, 1.000]",
        "+0.5000 [-0.963, +0.988]",
        "0.5000 [0.012, 0.988]",
        "+0.0000 [-0.924, +0.924]",
    ]
    assert cells["mean length"] == ["2", "4", "2"]
    named_alike = {"runs/a": report(1.0), "old/a/": report(1.0), "/": report(1.0), "http://host/b": report(1.0)}
    assert [str(column.header) for column in report_table(named_alike, {}).columns[1:]] == list(named_alike)


def test_eval_hands_over_targets_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    during_training = (
        "evaluation: {every: 5, on_start: true}\nearly_stopping: {}\ncheckpoint: {every: 5, keep_best: 1}\n"
    )
    recipe.write_text(f"model: {{path: m}}\nenvironment: {{dataset: chain_sum}}\n{during_training}")
    seen: list[Any] = []

    def evaluate_targets(targets: list[str], resolved: Any, *, all_tasks: bool) -> dict[str, EvalReport]:
        evaluation = resolved.evaluation
        seen.append(
            (targets, resolved.rollout.top_p, evaluation.samples, evaluation.k, evaluation.temperature, all_tasks)
        )
        return {target: report(1.0, 0.0) for target in targets}

    make_models(tmp_path, monkeypatch, "runs/x", "runs/y")
    replace_function(monkeypatch, "octetrl.run.evaluate", "evaluate_targets", evaluate_targets)
    arguments = ["eval", "runs/x", "rollout.top_p=0.9", "runs/y", "--recipe", str(recipe)]
    assert run_command(arguments) == 0
    assert run_command([*arguments, "--k", "4,1", "--temperature", "0.5", "--all-tasks"]) == 0
    assert seen == [(["runs/x", "runs/y"], 0.9, 1, (), 0.0, False), (["runs/x", "runs/y"], 0.9, 4, (1, 4), 0.5, True)]
    assert "accuracy         0.5000 [" in capsys.readouterr().out
    recipe.write_text("model: {path: m}\nenvironment: {dataset: chain_sum}\n")
    assert run_command([*arguments, "environment.eval_size=0"]) == 2
    assert "no task is held out" in capsys.readouterr().err


def test_one_completion_is_bare_text_and_several_say_whose_they_are() -> None:
    assert completions_text([[completion("hello")]]) == "hello"
    text = completions_text([[completion("a"), completion("b")], [completion("c"), completion("d")]])
    assert text.splitlines()[2:4] == ["--- prompt 1, completion 2: 2 tokens, stop", "b"]


def test_generate_hands_over_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_models(tmp_path, monkeypatch, "m")
    seen: list[Any] = []

    def generate_text(*arguments: Any, **options: Any) -> list[list[Completion]]:
        seen.append((arguments, options))
        return [[completion("x"), completion("y")] for _ in arguments[1]]

    replace_function(monkeypatch, "octetrl.run.generate", "generate_text", generate_text)
    words = (
        "generate m -p a -p b --max-new-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --stop s --stop t"
    )
    assert run_command([*words.split(), "--seed", "3", "--n", "2", "--precision", "fp8_full", "--device", "cpu"]) == 0
    sampling = SamplingParams(9, 0.5, 4, 0.9, 0.1, ("s", "t"))
    on_cpu = {"device": "cpu"}
    options = {
        "precision": "fp8_full",
        "cluster": on_cpu,
        "seed": 3,
        "n": [2, 2],
        "plain": False,
        "chat_template": None,
        "shows_progress": True,
        "fits": False,
    }
    assert seen == [(("m", [Task("", "a"), Task("", "b")], sampling), options)]
    assert "completion 2" in capsys.readouterr().out
    Path("rows.jsonl").write_text('{"prompt": "a", "n": 2}\n{"prompt": "b"}\n')
    assert run_command(["generate", "m", "--input", "rows.jsonl", "-n", "3"]) == 0
    assert seen[-1][1]["n"] == [2, 3] and seen[-1][1]["fits"]


def test_a_file_stays_as_it_was_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """As on a disk that is full: the result of an earlier evaluation is not lost."""
    old, link = tmp_path / "eval.json", tmp_path / "link.json"
    old.write_text("old")
    link.symlink_to(old)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=r"cannot write .*No space left"), whole_file("--out", link) as file:
        file.write_text("half")
        raise full
    assert old.read_text() == "old" and sorted(tmp_path.iterdir()) == [old, link]
    with whole_file("--out", link) as file:
        file.write_text("new")
    assert old.read_text() == "new" and sorted(tmp_path.iterdir()) == [old, link] and link.is_symlink()
    with whole_file("--out", Path("/dev/null")) as file:
        assert file == Path("/dev/null")


def test_a_full_disk_is_one_line_and_leaves_no_part_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out, recipe, reports = tmp_path / "new/out", load_recipe("demo_grpo"), {"model": EvalReport([], Scoring())}
    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", is_full)
        with pytest.raises(UserError, match=r"--out: cannot write '.*/out' \(No space left on device\)"):
            write_folder(str(out), recipe, reports, "{}")
    assert list(out.iterdir()) == [], "nothing that would stand in the way of the next attempt"
    write_folder(str(out), recipe, reports, "{}")
    names = ["config.yaml", "eval.json", "metrics.jsonl", "rollouts"]
    assert sorted(path.name for path in out.iterdir()) == names
    with pytest.raises(UserError, match="holds files already"):
        write_folder(str(out), recipe, reports, "another")
    assert (out / "eval.json").read_text() == "{}"


def test_a_folder_is_one_evaluations_and_leaves_nothing_without_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with reserved(str(out)):
        with pytest.raises(UserError, match=r"another evaluation is writing '.*out'; give"), reserved(str(out)):
            raise AssertionError("it has two")
        assert out.is_dir()
    assert not (tmp_path / "new").exists()
    with reserved(str(out)):
        (out / "eval.json").write_text("{}")
    assert [path.name for path in out.iterdir()] == ["eval.json"]
