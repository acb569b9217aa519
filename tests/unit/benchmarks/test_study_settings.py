"""A state of the study is of one cold start's changes or one pretrained model; other ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import job, lines, runs
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from tests.e2e.tiny_run import make_model
from tests.unit.benchmarks.test_study_lines import settled
from tests.unit.benchmarks.test_study_runs import SMALL


def test_lines_of_other_starts_or_models_are_not_compared() -> None:
    for name, one, other, why in (
        ("start_changes", [], ["steps=7"], "with no changes of the start, .* the changes steps=7 of the start"),
        ("model", "a", "b", "with the model a, .* with the model b"),
    ):
        given = [settled("bf16", 0, **{name: one}), settled("fp8", 0), settled("fp8", 1, **{name: other})]
        lines.refuse_mixed(given[:2], "")
        with pytest.raises(UserError, match=why):
            lines.refuse_mixed([given[0], given[2]], "--state")


@pytest.mark.parametrize("held", ["lines", "starts", "runs"])
@pytest.mark.parametrize(
    ("of_table", "begun", "other", "why"),
    [
        ("tiny-sums", ["--start-change", "seed=7"], [], "the changes seed=7 of the start, .* no changes of the start"),
        ("smollm2-sums", ["--model", "{tmp}/one"], ["--model", "{tmp}/two"], "the model .*, .* gives the model"),
    ],
)
def test_a_state_of_other_starts_or_another_model_is_refused(
    held: str, of_table: str, begun: list[str], other: list[str], why: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: None)
    for name, weights in (("one", b"1"), ("two", b"2"), ("one again", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    state = tmp_path / "state"
    has_start = of_table == "tiny-sums"
    said = {"start_changes": ["seed=7"]} if has_start else {"model": job.model_digest(str(tmp_path / "one"))}
    if held == "lines":
        name = f"{of_table}-bf16-0"
        job.write_line(state / f"lines/{name}.json", settled("bf16", 0, of_steps=None, table=of_table, **said))
    else:
        name = f"{of_table}-0" if held == "starts" else f"{of_table}-bf16-0"
        job.write_line(state / held / name / "made_with.json", said)

    def call(*words: str) -> None:
        runs.main([of_table, "--arms", "bf16", "--seeds", "1", "--state", *words])

    call(str(state), *(word.format(tmp=tmp_path) for word in begun))
    if not has_start:
        call(str(state), "--model", str(tmp_path / "one again"))
    given = [word.format(tmp=tmp_path) for word in other]
    with pytest.raises(UserError, match=f"--state: '{held}/{name}.* was trained with {why}"):
        call(str(state), *given)
    runs.pack(state, tmp_path / "packed", limit_mb=1, piece_mb=1)
    with pytest.raises(UserError, match=f"--unpack: '{held}/{name}.* was trained with {why}"):
        call(str(tmp_path / "new"), *given, "--unpack", str(tmp_path / "packed"))
    (state / f"lines/{name}.json" if held == "lines" else state / held / name / "made_with.json").unlink()
    call(str(state), *given)  # one that does not say it is accepted


def test_a_job_says_which_model_or_start_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(recipe: Any, *, resume: bool) -> None:
        raise KeyboardInterrupt

    model = str(make_model(tmp_path / "model"))
    monkeypatch.setattr(job, "train", stop)
    for words in (["smollm2-sums", "bf16", "0", "--model", model], ["tiny-sums", "start", "0", "steps=2"]):
        with pytest.raises(SystemExit) as ended:
            job.main([str(tmp_path / "state"), *words])
        assert ended.value.code == job.UNFINISHED
    begun = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob(f"state/runs/*/{job.MADE_WITH}")}
    held = {"model": job.model_digest(model)}
    assert begun == {"smollm2-sums-bf16-0": held, "tiny-sums-start-0": {"start_changes": ["steps=2"]}}
    monkeypatch.setattr(job, "train", train)
    job.main([str(tmp_path / "state"), "smollm2-sums", "bf16", "0", "--model", model, *SMALL])
    line = json.loads(job.line_path(tmp_path / "state", "smollm2-sums", "bf16", 0).read_text())
    assert line["model"] == held["model"] and "start_changes" not in line
    monkeypatch.setattr(job, "train", lambda recipe, resume: None)
    monkeypatch.setattr(job, "export_run", lambda run, folder: shutil.copytree(model, folder))
    job.main([str(tmp_path / "state"), "tiny-sums", "start", "0", "steps=2"])
    assert job.read_made_with(job.start_folder(tmp_path / "state", "tiny-sums", 0)) == {"start_changes": ["steps=2"]}
