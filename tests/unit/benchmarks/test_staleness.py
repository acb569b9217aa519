"""The sweep over `cluster.max_staleness`: what differs between its arms, and that the same command continues it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import staleness
from benchmarks.command import run_command
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.system.errors import Terminated, UserError

STEPS = 4


class Trains:
    """In place of `octetrl train`: each look at the process is a step. `stops`: the steps after which a run, by the
    folder's name, ends without having all; it is asked to stop, or fails with a code."""

    begun: list[tuple[str, bool]]  # (folder's name, resumed)
    stops: dict[str, tuple[int, int]]  # after how many steps, and with which code

    def __init__(self, command: list[str], **_: Any) -> None:
        changes = [word for word in command if "=" in word]
        config = load_recipe(command[4], changes)
        self.folder, self.staleness = Path(config.output_dir), config.cluster.max_staleness
        self.begun.append((self.folder.name, "--resume" in command))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(dump_recipe(config))
        self.file = self.folder / "metrics.jsonl"
        whole = self.file.read_text().rpartition("\n")[0] if self.file.exists() else ""
        self.file.write_text(whole + "\n" if whole else "")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            step = len(self.file.read_text().splitlines()) + 1
            line = {"step": step, "time/step": 2.0, "rollout/staleness": float(self.staleness), "loss": 0.5}
            line |= {"eval/accuracy": step / 10} if step % 2 == 0 else {}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            after, code = self.stops.pop(self.folder.name, (STEPS, 0)) if step >= 2 else (STEPS, 0)
            self.returncode = code if step >= after else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGINT
        self.returncode = 130

    def wait(self, _: float | None = None) -> int | None:
        return self.returncode


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    Trains.begun, Trains.stops = [], {}
    others = {name: getattr(subprocess, name) for name in ("STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(staleness, "subprocess", SimpleNamespace(Popen=Trains, **others))
    monkeypatch.setattr(staleness, "POLL_SECONDS", 0.0)
    return Trains.begun


def sweep(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """What the command writes."""
    given = ["--staleness", "0,1,4", "--seeds", "2", "--steps", str(STEPS), "--eval-every", "2"]
    given += ["--state", str(folder / "state"), "--out", str(folder), "--name", "x", *words]
    monkeypatch.setattr("sys.argv", ["staleness", *given])
    staleness.main()
    found: dict[str, Any] = json.loads((folder / "staleness_x.json").read_text())
    return found


def test_every_arm_is_the_recipe_with_its_own_lead_and_seed(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sweep(tmp_path, monkeypatch, "--curve", str(tmp_path / "c.svg"), "rollout.group_size=5")
    assert begun == [(name, False) for name in ("0_0", "1_0", "4_0", "4_1", "1_1", "0_1")]
    assert [(one["staleness"], one["seed"], one["steps"]) for one in found["arms"]] == [
        (int(name[0]), int(name[2]), STEPS) for name, _ in begun
    ]
    assert {(one["seconds"], one["eval/accuracy"]) for one in found["arms"]} == {(8.0, 0.4)}
    rows = [row for row in found["rows"] if (row["staleness"], row["seed"]) == (4, 1)]
    assert [(row["step"], row["seconds"], row["rollout/staleness"]) for row in rows] == [
        (step, 2.0 * step, 4.0) for step in range(1, STEPS + 1)
    ]
    assert [row.get("eval/accuracy") for row in rows] == [None, 0.2, None, 0.4] and "loss" not in rows[0]
    assert rows[0]["workload"].endswith("x5") and "K = 4" in (tmp_path / "c.svg").read_text()


def test_an_arm_on_gpus_and_one_without_a_lead(tmp_path: Path) -> None:
    parsed = staleness.argparse.Namespace(
        recipe="demo_grpo", cpus=[1, 1], gpus=[1, 2], in_flight="recompute_cache", steps=9, eval_every=3, changes=[]
    )
    for lead, in_flight in ((0, "off"), (2, "recompute_cache")):
        recipe = load_recipe(staleness.recipe_file(parsed), staleness.changes_of(parsed, lead, 7, tmp_path))
        cluster = recipe.cluster
        assert (cluster.roles, cluster.num_gpus, cluster.max_staleness) == ((1, 2), 3, lead)
        assert cluster.weights_in_flight == in_flight and (recipe.seed, recipe.steps) == (7, 9)


def test_the_same_command_continues(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trains.stops = {"4_0": (2, 1)}
    with pytest.raises(UserError, match="1 of 6 arms failed; K = 4, seed 0 ended with 1"):
        sweep(tmp_path, monkeypatch)
    assert [name for name, _ in begun] == ["0_0", "1_0", "4_0", "4_1", "1_1", "0_1"], "the others go on"
    assert len(json.loads((tmp_path / "staleness_x.json").read_text())["arms"]) == 5
    with (tmp_path / "state" / "4_0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time')  # it was killed while it wrote
    begun.clear()
    found = sweep(tmp_path, monkeypatch)
    assert begun == [("4_0", True)], "what ended is not run again"
    assert len(found["arms"]) == 6 and {one["steps"] for one in found["arms"]} == {STEPS}
    begun.clear()
    assert sweep(tmp_path, monkeypatch)["arms"] == found["arms"] and not begun


def test_a_sweep_whose_time_is_over_stops_its_runs_and_writes_what_ended(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(staleness.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(UserError, match="no arm ended in 2 s; run it again with the same --state to go on"):
        sweep(tmp_path, monkeypatch, "--seconds", "2")
    assert begun == [("0_0", False)]
    begun.clear()
    found = sweep(tmp_path, monkeypatch, "--seconds", "8", "--jobs", "2")
    assert begun[0] == ("0_0", True) and 0 < len(found["arms"]) < 6


def test_an_arm_that_takes_its_last_step_while_it_is_stopped_has_ended(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(run: Trains, _: int) -> None:
        while run.poll() is None:
            pass

    monkeypatch.setattr(Trains, "send_signal", finish)
    clock = iter(range(1000))
    monkeypatch.setattr(staleness.time, "monotonic", lambda: float(next(clock)))
    found = sweep(tmp_path, monkeypatch, "--seconds", "2")
    assert begun == [("0_0", False)] and [one["steps"] for one in found["arms"]] == [STEPS]


def test_a_folder_of_another_arm_is_refused(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tmp_path, monkeypatch)
    state, other = tmp_path / "state", tmp_path / "other.yaml"
    other.write_text("extends: demo_grpo\nrollout:\n  temperature: 0.9\n")
    begun.clear()
    for words, field in (
        (["rollout.group_size=5"], "rollout.group_size is 8 there and 5 here"),
        (["--steps", "5"], "steps is 4 there and 5 here"),
        (["--in-flight", "keep_cache", "--staleness", "4"], "cluster.weights_in_flight is 'off' there"),
        (["--recipe", str(other)], "rollout.temperature is 1.0 there and 0.9 here"),
    ):
        with pytest.raises(UserError, match=f"--state: '.*_0' holds a run of another arm: {field}") as error:
            sweep(tmp_path, monkeypatch, *words)
        assert "\n" not in str(error.value)
    (state / "4_0").rename(state / "2_0")
    with pytest.raises(UserError, match=r"'.*/2_0' holds .*: cluster.max_staleness is 4 there and 2 here"):
        sweep(tmp_path, monkeypatch, "--staleness", "2")
    (state / "0_0" / "config.yaml").unlink()
    with pytest.raises(
        UserError, match=r"'.*/0_0' holds metrics.jsonl but no config.yaml, so its arm is unknown; restore"
    ):
        sweep(tmp_path, monkeypatch)
    assert not begun


def test_a_state_in_another_folder_and_with_other_logs_continues(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tmp_path, monkeypatch)
    (tmp_path / "state").rename(tmp_path / "moved")
    begun.clear()
    assert len(sweep(tmp_path, monkeypatch, "--state", str(tmp_path / "moved"), "logging.console=quiet")["arms"]) == 6
    assert not begun


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"garbage", "not JSON"),
        (b"[3]", "not an object"),
        (b"\xff", "not JSON"),
        (b'{"time/step": 2.0}', "'step' is None, 3 is needed"),
        (b'{"step": 2, "time/step": 2.0}', "'step' is 2, 3 is needed"),
        (b'{"step": 3}', "'time/step' is None, a finite number is needed"),
        (b'{"step": 3, "time/step": NaN}', "'time/step' is nan"),
        (b'{"step": 3, "time/step": 1' + b"0" * 400 + b"}", "'time/step' is 1000000"),
        (b'{"step": 3, "time/step": 2.0, "eval/accuracy": "a"}', "'eval/accuracy' is 'a'"),
    ],
    ids=str,
)
def test_a_damaged_line_of_metrics_is_named(
    line: bytes, why: str, begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(tmp_path, monkeypatch)
    begun.clear()
    file = tmp_path / "state" / "1_0" / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]) + b"\n")
    with pytest.raises(UserError, match=f"1_0/metrics.jsonl, line 3: {why}"):
        sweep(tmp_path, monkeypatch)
    assert not begun


def test_sigterm_stops_the_runs_of_a_sweep(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sent = list[str](), list[int]()

    def poll(_: Trains) -> None:
        if not sent:  # once: a second signal ends the process
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trains, "send_signal", lambda run, number: asked.append(run.folder.name))
    monkeypatch.setattr(Trains, "poll", poll)
    with pytest.raises(SystemExit) as ended:
        run_command("staleness", lambda: print(sweep(tmp_path, monkeypatch, "--jobs", "2")))
    assert ended.value.code == 143 and begun == [("0_0", False), ("1_0", False)]
    assert set(asked) == {"0_0", "1_0"}


def test_arms_with_fewer_evaluations_than_a_curve_needs_have_no_picture(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Trains.stops = {"0_0": (2, 0)}
    sweep(tmp_path, monkeypatch, "--steps", "2", "--staleness", "0", "--seeds", "1", "--curve", str(tmp_path / "c.svg"))
    assert "--curve: no picture, because no arm has two evaluations" in capsys.readouterr().out
    assert not (tmp_path / "c.svg").exists() and (tmp_path / "staleness_x.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--name", "../../esc"], r"--name: '\.\./\.\./esc' is no name of a result"),
        (["--name", ""], "--name: '' is no name"),
        (["--curve", "{tmp}/file/x.svg"], "--curve: cannot write in '.*/file'"),
        (["--curve", "/proc/x/y.svg"], "--curve: cannot write in '/proc/x'"),
        (["--curve", "{tmp}"], "--curve: '.*' is a folder"),
        (["--out", "{tmp}/file"], "--out: cannot write in '.*/file'"),
        (["--out", "{tmp}/out"], "--out: '.*/out/staleness_x.json' is a folder"),
    ],
    ids=str,
)
def test_where_nothing_can_be_written_is_refused_before_a_run_begins(
    words: list[str], why: str, begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out" / "staleness_x.json").mkdir(parents=True)
    with pytest.raises(UserError, match=why):
        sweep(tmp_path, monkeypatch, *(word.format(tmp=tmp_path) for word in words))
    assert not begun and {path.name for path in tmp_path.iterdir()} == {"file", "out"}


def test_a_picture_that_fails_leaves_the_result(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(staleness, "panels", fail)
    with pytest.raises(OSError, match="full"):
        sweep(tmp_path, monkeypatch, "--curve", str(tmp_path / "new" / "c.svg"))
    assert (tmp_path / "staleness_x.json").exists() and len(begun) == 6


def test_accuracy_at_equal_time_lies_between_two_evaluations() -> None:
    def arm(seconds: float) -> list[staleness.Row]:
        names = ("precision", "workload", "staleness", "in_flight", "jobs", "seed")
        rows: list[staleness.Row] = []
        for step in range(1, 5):
            accuracy: staleness.Row = {"eval/accuracy": step / 10} if step % 2 == 0 else {}
            rows.append(dict.fromkeys(names, 0) | {"step": step, "seconds": seconds * step, **accuracy})
        return rows

    assert staleness.accuracy_at(2.5, arm(1.0)) == pytest.approx(0.25)
    assert staleness.accuracy_at(1.5, arm(1.0)) is None and staleness.accuracy_at(4.5, arm(1.0)) is None
    fast, slow = staleness.with_equal_time([arm(2.0), arm(3.2)])
    assert (fast["equal_time/seconds"], fast["equal_time/accuracy"], slow["equal_time/accuracy"]) == (8.0, 0.4, 0.25)


def test_a_wrong_recipe_is_refused_before_a_run_begins(
    begun: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"rollout\.group_sise"):
        sweep(tmp_path, monkeypatch, "rollout.group_sise=5")
    with pytest.raises(UserError, match="max_staleness"):
        sweep(tmp_path, monkeypatch, "--staleness", "0,65")  # one of the later arms
    assert not list(tmp_path.iterdir()), "no new folder is left"
    (tmp_path / "state").touch()
    with pytest.raises(UserError, match=r"'.*state' is a file"):
        sweep(tmp_path, monkeypatch)
    assert not begun


@pytest.mark.parametrize(
    "words",
    [("--cpus", "1"), ("--gpus", "1,2,3"), ("--seeds", "0"), ("--seeds", "9" * 30), ("--jobs", "-1"),
     ("--seconds", "nan"), ("--staleness", "1,,2"), ("--first-seed", "1.5"), ("--steps", "\u0664")],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_option_is_one_line(
    words: tuple[str, str],
    begun: list[tuple[str, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep(tmp_path, monkeypatch, *words)
    assert ended.value.code == 2 and not begun
    assert f"argument {words[0]}: '" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(UserError("no"), 2, "no"), (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
     (Terminated(), 143, "stopped by SIGTERM")],
    ids=["wrong", "Ctrl-C", "SIGTERM"],
)  # fmt: skip
def test_a_script_ends_with_one_line(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> None:
        if isinstance(error, Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command("staleness", stopped)
    assert ended.value.code == code and capsys.readouterr().err == f"benchmarks.staleness: {said}\n"
