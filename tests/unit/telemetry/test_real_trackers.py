"""A run of three steps, with the real client of each tracker in its offline mode. setup/outside_packages.sh installs
them; elsewhere these tests are skipped."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import octetrl
from tests.required import missing

OFFLINE = {
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "local",
    "TRACKIO_DIR": "trackio",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
}
RUN = """
import sys
from pathlib import Path
from octetrl.config.schema import LoggingConfig
from octetrl.telemetry.sinks import open_sinks

name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = LoggingConfig(report_to=(name,), tensorboard=False, project="fp8", group="sweep", tags=("a",))
folder = Path("run")
folder.mkdir(exist_ok=True)
warned = []
recipe = {"seed": 3, "trainer": {"lr": 0.5, "names": ["a", "b"]}, **{f"field{i}": i for i in range(300)}}
with open_sinks(folder, config, recipe, first - 1, warned.append, "0123456789ab") as sinks:
    for step in range(first, last + 1):
        sinks.write(step, {"loss": step / 4, "eval/pass@4": float("nan")})
assert warned == [], warned
"""


def tracked(name: str, folder: Path) -> list[tuple[int, float]]:
    """What the client keeps of the run, by its own reader or in its own files."""
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        (run,) = client.search_runs([client.get_experiment_by_name("fp8").experiment_id])
        assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("run", "FINISHED", "sweep")
        assert run.data.params["trainer.lr"] == "0.5"
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
    if name == "trackio":
        with sqlite3.connect(folder / "trackio" / "fp8.db") as rows:
            found = rows.execute("select run_id, step, json_extract(metrics, '$.loss') from metrics").fetchall()
        assert len({run_id for run_id, _, _ in found}) == 1
        return [(step, loss) for _, step, loss in found]
    if name == "wandb":
        return [
            point for file in sorted(folder.glob("run/wandb/*-0123456789ab/run-*.wandb")) for point in in_wandb(file)
        ]
    logs = sorted(folder.glob("run/swanlog/run-*-0123456789ab/logs/1/*.log"))  # 1: its number for `loss`
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [(row["index"], row["data"]) for row in rows]


def in_wandb(file: Path) -> Iterator[tuple[int, float]]:
    """The rows of an offline run: protobuf records in a LevelDB log of 32 KiB blocks, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (place % 32768) > 32768 - 7:  # the rest of a block is too short for a header
            place += 32768 - place % 32768
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            items = Record.FromString(record).history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            record = b""
            if row:
                yield row["_step"], row["loss"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_run_is_written_and_resumed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is None:
        missing("trackers", f"{name} is not installed")
    monkeypatch.setenv("PYTHONPATH", str(Path(octetrl.__file__).parents[1]))  # for the process below
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    for first, last in ((1, 2), (3, 3)):
        command = [sys.executable, "-c", RUN, name, str(first), str(last)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert tracked(name, tmp_path) == [(1, 0.25), (2, 0.5), (3, 0.75)]
