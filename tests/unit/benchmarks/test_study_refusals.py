"""What the study's runner refuses, in one line."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy
import pytest
import yaml

from benchmarks.command import held_signals, run_command
from benchmarks.study import job, runs, travel
from octetrl.system.errors import Terminated, UserError
from octetrl.system.sigterm import terminable
from tests.unit.benchmarks.test_study_runs import fake_jobs


@pytest.mark.parametrize("damage", ["cut", "missing", "other", "empty"])
def test_a_damaged_pack_is_one_line(damage: str, tmp_path: Path) -> None:
    state, packed = tmp_path / "state", tmp_path / "packed"
    (state / "starts" / "one").mkdir(parents=True)
    (state / "starts" / "one" / "weights").write_bytes(numpy.random.default_rng(0).bytes(30_000))
    runs.pack(state, packed, limit_mb=1.0, piece_mb=0.01)
    first, second, *_ = sorted(packed.iterdir())
    if damage == "missing":
        second.unlink()
    else:
        first.write_bytes({"cut": first.read_bytes()[:100], "other": b"x" * 100, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"--unpack: the pieces in .* are damaged or incomplete") as error:
        runs.unpack(packed, tmp_path / "other")
    assert "\n" not in str(error.value) and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--jobs 0", "--jobs: 0 is too small; give 1 or more"),
        ("--seeds 0", "--seeds: 0 is too small"),
        ("--seeds -3", "--seeds: -3 is too small"),
        ("--first-seed -1", "--first-seed: -1 is too small; give 0 or more"),
        ("--seconds nan", "--seconds: nan can't be used; give a number above 25"),
        ("--seconds 25", "--seconds: 25 can't be used"),
        ("--job-seconds nan", "--job-seconds: nan can't be used"),
        ("--piece-mb 0", "--piece-mb: 0 can't be used; give 0.001 or more"),
        ("--pack-mb nan", "--pack-mb: nan can't be used"),
        ("--pack /proc/x", "--pack: cannot write in '/proc/x'"),
        ("--state /proc/zz", "--state: cannot write in '/proc/zz'"),
        ("--unpack {file}", "--unpack: '.*file' holds no state.tar.gz.00"),
        ("--state {file}", "--state: cannot write in '.*file'"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_line(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: pytest.fail("a job was started"))
    (tmp_path / "file").touch()
    first = ["smollm2-sums", "--model", "m", "--arms", "bf16", "--state", str(tmp_path / "state")]
    with pytest.raises(UserError, match=says) as error:
        runs.main([*first, *words.format(file=tmp_path / "file").split()])
    assert "\n" not in str(error.value)


def test_a_hundred_pieces_and_more_are_unpacked_in_their_order(tmp_path: Path) -> None:
    state, packed = tmp_path / "state", tmp_path / "packed"
    content = numpy.random.default_rng(0).bytes(125_000)
    (state / "starts" / "one").mkdir(parents=True)
    (state / "starts" / "one" / "weights").write_bytes(content)
    runs.pack(state, packed, limit_mb=1.0, piece_mb=0.001)
    assert len(list(packed.iterdir())) > 100
    runs.unpack(packed, tmp_path / "other")
    assert (tmp_path / "other" / "starts" / "one" / "weights").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("state.tar.gz.1", "state.tar.gz.1' is named as no piece that --pack writes; delete or rename it"),
        ("state.tar.gz.000", "state.tar.gz.000' is named as no piece"),
        ("state.tar.gz.99999999999", r"damaged or incomplete \(state.tar.gz.\d\d is missing\)"),
    ],
)
def test_a_piece_that_was_not_packed_is_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "state" / "starts" / "one").mkdir(parents=True)
    (tmp_path / "state" / "starts" / "one" / "weights").write_bytes(numpy.random.default_rng(0).bytes(30_000))
    runs.pack(tmp_path / "state", tmp_path / "packed", limit_mb=1.0, piece_mb=0.01)
    assert (tmp_path / "packed" / "state.tar.gz.01").exists()
    (tmp_path / "packed" / name).write_bytes(b"other")
    began = time.monotonic()
    with pytest.raises(UserError, match=why):
        runs.unpack(tmp_path / "packed", tmp_path / "other")
    assert time.monotonic() - began < 10 and not (tmp_path / "other").exists()


def test_only_paths_in_the_state_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = Path("runs/study"), tmp_path / 'é "new"'
    values = ["/disk/runs/study/a", "runs/study2/a", "my runs/study/a", "a:runs/study/b"]
    config = {"output_dir": "runs/study/runs/x", "whole": "runs/study", "others": values, "rate": 1e-6}
    config["long"] = "runs/study/" + "a folder " * 20
    recipe = old / "runs" / "x" / "config.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# runs/study/c\n" + yaml.safe_dump(config, allow_unicode=True))
    runs.pack(old, tmp_path / "packed", limit_mb=1.0, piece_mb=1.0)
    runs.unpack(tmp_path / "packed", new)
    text = (new / "runs" / "x" / "config.yaml").read_text()
    assert text.startswith("# runs/study/c\n") and "1.0e-06" in text
    moved = {"output_dir": f"{new}/runs/x", "whole": str(new), "long": f"{new}/" + "a folder " * 20}
    assert yaml.safe_load(text) == config | moved
    recipe.write_text('a: "')
    runs.pack(old, tmp_path / "packed", limit_mb=1.0, piece_mb=1.0)
    with pytest.raises(UserError, match="damaged or incomplete") as error:
        runs.unpack(tmp_path / "packed", tmp_path / "other")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["{", "[]", '{"state": 3}', "\udcff"], ids=["cut", "list", "number", "bytes"])
def test_a_damaged_place_leaves_the_state_as_it_was(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, packed = tmp_path / "state", tmp_path / "packed"
    (state / "starts" / "one").mkdir(parents=True)

    def write(path: Path, line: object) -> None:
        path.write_bytes(place.encode(errors="surrogateescape"))

    monkeypatch.setattr(travel, "write_line", write)
    runs.pack(state, packed, limit_mb=1.0, piece_mb=1.0)
    monkeypatch.undo()
    held = tmp_path / "held"
    job.write_line(held / "lines" / "a.json", {"seed": 1})
    for other in (tmp_path / "new" / "deep", held):
        with pytest.raises(UserError, match=r"--unpack: the pieces in .* are damaged or incomplete") as error:
            runs.unpack(packed, other)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in held.rglob("*")) == ["a.json", "lines"]


@pytest.mark.parametrize("words", ["--jobs 0", "--arms fp9", "--then bf16:1:0", "--change a.b=1", "--pack {file}"])
def test_other_wrong_arguments_are_refused_before_unpacking(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "from" / "starts" / "one").mkdir(parents=True)
    runs.pack(tmp_path / "from", tmp_path / "packed", limit_mb=1.0, piece_mb=1.0)
    first = ["tiny-sums", "--state", str(tmp_path / "state"), "--unpack", str(tmp_path / "packed")]
    with pytest.raises(UserError):
        runs.main([*first, *words.format(file=tmp_path / "file").split()])
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: None)
    runs.main(first)
    assert (tmp_path / "state" / "starts" / "one").is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_the_jobs_and_packs(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_jobs(monkeypatch, steps=1000)
    state, jobs = tmp_path / "state", list[int]()

    def stop() -> None:
        until = time.monotonic() + 90
        while len(found := list(state.glob("runs/*/waits"))) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        jobs.extend(int(path.read_text()) for path in found)
        os.kill(os.getpid(), number)

    words = f"smollm2-sums --model m --arms bf16,fp8 --seeds 1 --jobs 2 --seconds 200 --state {state}"
    words += f" --pack {tmp_path / 'packed'}"
    stopper = threading.Thread(target=stop)
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        stopper.start()
        with pytest.raises(SystemExit) as ended:
            run_command("study.runs", lambda: runs.main(words.split()))
        stopper.join()
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert ended.value.code == code and len(jobs) == 2
    for one in jobs:
        with pytest.raises(ProcessLookupError):
            os.kill(one, 0)
    runs.unpack(tmp_path / "packed", tmp_path / "other")
    assert len(list((tmp_path / "other" / "runs").iterdir())) == 2


def test_a_signal_waits_until_a_process_is_noted() -> None:
    noted = []
    with pytest.raises(Terminated), terminable():
        with held_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            noted.append("process")
        noted.append("after the block")
    assert noted == ["process"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("seconds", "", "seconds: '' is no number of seconds; delete the file to count from 0"),
        ("seconds", "nan", "seconds: 'nan' is no number of seconds"),
        ("seconds", "-1", "seconds: '-1' is no number of seconds"),
        ("made_with.json", "{", "made_with.json: not JSON"),
        ("made_with.json", '{"start_changes": [1]}', r"made_with.json: 'start_changes' is \[1\], a list of texts"),
        ("made_with.json", '{"model": 1}', "made_with.json: 'model' is 1, a text is needed"),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line(
    name: str, text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: pytest.fail("a job was started"))
    folder = tmp_path / "state" / "runs" / "tiny-sums-bf16-0"
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    runs.pack(tmp_path / "state", tmp_path / "packed", limit_mb=1.0, piece_mb=1.0)
    where = f"runs/tiny-sums-bf16-0/{why}"
    with pytest.raises(UserError, match=f"^--state: {where}") as error:
        runs.main(["tiny-sums", "--state", str(tmp_path / "state")])
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"^--unpack: {where}"):
        runs.main(["tiny-sums", "--state", str(tmp_path / "new"), "--unpack", str(tmp_path / "packed")])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"tiny-sums-arm": "1"}', '{"tiny-sums-arm": NaN}', f'{{"a": 1{"0" * 400}}}']
)
def test_damaged_seconds_of_jobs_are_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: pytest.fail("a job was started"))
    (tmp_path / "seconds.json").write_text(text)
    with pytest.raises(UserError, match=r"--state: 'seconds.json' does not hold the seconds of jobs"):
        runs.main(["tiny-sums", "--state", str(tmp_path)])
    (tmp_path / "seconds.json").write_text(json.dumps({"tiny-sums-arm": 0.0}))
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: None)
    runs.main(["tiny-sums", "--state", str(tmp_path)])
