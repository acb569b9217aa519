"""What a box promises, of each kind that works here."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from octetrl.boxes.box import PAYLOAD, Box, BoxError
from octetrl.boxes.boxes import Boxes, open_box
from octetrl.boxes.containers import LABEL, Container, begun, remove, sweep
from octetrl.config.box import BoxConfig
from octetrl.records import Task
from octetrl.system.errors import UserError
from tests.unit.boxes.made import ENGINES, IMAGE, config_of


@pytest.fixture(params=["bubblewrap", "folder", "podman", "docker"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> BoxConfig:
    return config_of(request.param, tmp_path)


def in_box(config: BoxConfig, use: Callable[[Box], Awaitable[None]]) -> None:
    async def used() -> None:
        async with await open_box(config) as box:
            await use(box)
        assert not box.alive()

    asyncio.run(used())


def test_commands_files_and_what_they_leave(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        script = "echo out; echo err >&2; echo $A >/tmp/kept; exit 3"
        result = await box.run(["sh", "-c", script], env={"A": "b c"})
        assert (result.code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert await box.get("/tmp/kept") == b"b c\n"
        data = bytes(range(256)) * 1000
        await box.put("/tmp/a folder/file", data)
        assert await box.get("/tmp/a folder/file") == data
        with pytest.raises(OSError, match="/tmp/none"):
            await box.get("/tmp/none")
        assert (await box.run(["cat"], stdin="given")).stdout == "given"
        assert (await box.run(["no-such-program"])).code == 127
        assert (await box.run(["pwd"], cwd="/no/folder")).code == 126
        assert (await box.run(["pwd"], cwd="/tmp")).stdout == "/tmp\n"
        assert (await box.run(["sh", "-c", "kill -9 $$"])).code == 137
        assert (await box.run(["sh", "-c", "kill -9 1; kill -9 -1; kill -9 $PPID"])).code == 137
        assert (await box.run(["true"])).code == 0 and box.alive()

    in_box(config, use)


def test_a_command_that_cannot_be_run_is_the_agents_matter(config: BoxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.boxes.box.FILE_BYTES", 1000)

    async def use(box: Box) -> None:
        for word in ("a\0b", "\ud800", "x" * 200_000):
            result = await box.run(["echo", word])
            assert (result.code, result.stdout) == (126, "") and result.stderr
        assert (await box.run(["true"], env={"A": "\0"})).code == 126
        for path in ("/tmp/a\0b", "/dev/zero"):
            with pytest.raises(OSError, match=r"larger|null"):
                await asyncio.wait_for(box.get(path), 5)
        assert (await box.run(["true"])).code == 0 and box.alive()

    in_box(config, use)


def test_a_command_whose_time_is_over_is_ended_and_the_box_goes_on(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        spreads = "(while :; do sleep 0.1; done) & echo begun; while :; do :; done"
        result = await box.run(["sh", "-c", spreads], seconds=0.5)
        assert (result.code, result.stdout, result.stopped) == (None, "begun\n", "wall_timeout")
        assert "sleep 0.1" not in (await box.run(["ps", *([] if config.image else ["-ef"])])).stdout

    in_box(config, use)


def test_a_box_sees_neither_variables_nor_files_of_the_run(
    config: BoxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "123-secret-456")
    (tmp_path / "file").write_text("x")

    async def use(box: Box) -> None:
        for place in ("/proc/*/environ", "/proc/*/task/*/environ"):
            assert "secret" not in (await box.run(["sh", "-c", f"cat {place}"])).stdout
        assert (await box.run(["cat", str(tmp_path / "file")])).code == 1
        if config.kind == "bubblewrap":
            attack = "mount -o remount,rw,bind /usr; mount -t tmpfs x /usr; mkdir /usr/x; unshare -Ur true"
            assert (await box.run(["sh", "-c", attack])).code != 0
            assert (await box.run(["ls", "-d", "/usr/x"])).code != 0

    in_box(config, use)


def test_a_bubblewrap_box_limits_memory_and_files(tmp_path: Path) -> None:
    async def use(box: Box) -> None:
        assert (await box.run(["python3", "-c", "bytearray(100 << 20)"])).stderr.endswith("MemoryError\n")
        written = await box.run(["sh", "-c", "head -c 100000000 /dev/zero >/tmp/x; wc -c </tmp/x"])
        assert int(written.stdout) == 64 << 20

    in_box(config_of("bubblewrap", tmp_path).model_copy(update={"memory_mib": 64}), use)


KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))


@pytest.mark.skipif(os.geteuid() == 0 and KERNEL < (6, 14), reason="root's processes have no limit before Linux 6.14")
def test_a_bubblewrap_box_limits_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.boxes.bubblewrap.MOST_PROCESSES", 320)
    monkeypatch.setattr("octetrl.boxes.box._LOST_SECONDS", 0.1)

    async def use(box: Box) -> None:
        assert (await box.run(["sh", "-c", "echo 4000 >/proc/sys/kernel/pid_max"])).code != 0
        starts = "i=0; while [ $i -lt 400 ]; do sleep 60 & i=$((i+1)); done"
        assert (await box.run(["sh", "-c", f"({starts}) >/dev/null 2>&1"])).code == 2
        with pytest.raises(BoxError):  # there is no room for another process
            await box.run(["true"])

    in_box(config_of("bubblewrap", tmp_path), use)


def test_a_command_that_cannot_be_ended_ends_its_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.boxes.box._KILL", "sleep 60")

    async def use(box: Box) -> None:
        monkeypatch.setattr("octetrl.boxes.box._KILL_SECONDS", 0.2)
        assert (await box.run(["sleep", "60"], seconds=0.2)).stopped == "wall_timeout"
        assert not box.alive() and box.lost is not None
        with pytest.raises(BoxError, match="could not be ended"):
            await box.run(["true"])

    in_box(config_of("bubblewrap", tmp_path), use)


def test_a_command_whose_task_is_cancelled_is_ended(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        running = asyncio.create_task(box.run(["sh", "-c", "echo >/tmp/begun; sleep 4321"]))
        while (await box.run(["cat", "/tmp/begun"])).code != 0:
            pass
        running.cancel()
        while "4321" in (await box.run(["ps", *([] if config.image else ["-ef"])])).stdout:
            pass

    in_box(config, use)


def test_the_middle_of_a_long_output_is_left_out(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        script = "echo first; head -c 300000 /dev/zero | tr '\\0' x; echo; echo last"
        result = await box.run(["sh", "-c", f"({script}) | tee /dev/stderr"], output_bytes=1000)
        for text in (result.stdout, result.stderr):
            assert text.startswith("first\nxx") and text.endswith("x\nlast\n") and len(text) < 1100
            assert f"[{300_012 - 1000:,} bytes left out]" in text
        assert result.code == 0

    in_box(config, use)


def test_a_shell_keeps_its_folder_and_variables(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        shell = box.shell(cwd="/tmp")
        await shell.run("export A=1; B='x y\n z'; mkdir -p q; cd q")
        result = await shell.run('echo "$A$B"; pwd; echo err >&2; exit 5')
        assert (result.code, result.stdout) == (5, "1x y\n z\n/tmp/q\nerr\n")
        result = await shell.run("A=2; sleep 1234; true", seconds=0.5)
        assert result.stopped == "wall_timeout"
        assert "1234" not in (await box.run(["ps", *([] if config.image else ["-ef"])])).stdout
        assert (await shell.run("echo $A; pwd")).stdout == "1\n/tmp/q\n"
        assert (await shell.run("sleep 60 & echo begun", seconds=30.0)).stdout == "begun\n"

    in_box(config, use)


class _Policy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"an answer")

    def log_message(self, *_: object) -> None:
        pass


def test_without_a_network_a_box_reaches_the_policy_and_nothing_else(config: BoxConfig) -> None:
    servers = [HTTPServer(("127.0.0.1", 0), _Policy) for _ in range(2)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    policy, other = (server.server_port for server in servers)
    fetch = ["wget", "-q", "-O", "-"] if config.image else ["python3", "-c", _FETCH]

    async def use(box: Box) -> None:
        assert (await box.run([*fetch, f"http://127.0.0.1:{policy}/"])).code != 0
        await box.forward(policy)
        assert (await box.run([*fetch, f"http://127.0.0.1:{policy}/"])).stdout == "an answer"
        assert (await box.run([*fetch, f"http://127.0.0.1:{other}/"])).code != 0

    try:
        in_box(config, use)
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


_FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode(), end='')"


def test_a_box_that_is_killed_is_lost_and_has_no_exit_code(config: BoxConfig) -> None:
    async def use(box: Box) -> None:
        running = asyncio.create_task(box.run(["sh", "-c", "echo begun >/tmp/begun; sleep 60"]))
        while (await box.run(["cat", "/tmp/begun"])).code != 0:
            pass
        os.kill(box.find_pid(), signal.SIGKILL)
        with pytest.raises(BoxError):
            await running
        with pytest.raises(BoxError):
            await box.run(["true"])
        assert not box.alive() and box.lost is not None

    in_box(config, use)


def test_a_start_that_failed_counts_until_another_box_has_started(tmp_path: Path) -> None:
    boxes = Boxes(config_of("bubblewrap", tmp_path)).of(Task("1", "?"))

    async def use() -> None:
        with pytest.raises(BoxError):
            await boxes.open(image=str(tmp_path / "none"))
        assert boxes.is_used and boxes.lost() is not None
        await boxes.open()
        assert boxes.lost() is None
        await boxes.close()

    asyncio.run(use())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_connection_that_is_cut_is_no_exit_code(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path)

    async def use(box: Box) -> None:
        running = asyncio.create_task(box.run(["sh", "-c", "echo >/tmp/begun; sleep 60"]))
        while (await box.run(["cat", "/tmp/begun"])).code != 0:
            pass
        (client,) = (pid for pid in _children() if b"\0exec\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(client, signal.SIGKILL)
        with pytest.raises(BoxError):
            await running

    in_box(config, use)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


DIES = """
import asyncio, os, sys
from octetrl.boxes.boxes import open_box
from octetrl.config.box import BoxConfig
async def dies():
    box = await open_box(BoxConfig.model_validate_json(sys.argv[1]))
    print(box.find_pid(), flush=True)
    await box.run(["sleep", "60"])
asyncio.run(dies())
"""


def test_a_box_ends_with_its_run_however_that_ends(config: BoxConfig) -> None:
    run = subprocess.Popen([os.sys.executable, "-c", DIES, config.model_dump_json()], stdout=subprocess.PIPE)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    limit = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ENGINES)
def test_containers_that_a_killed_run_left_are_removed_and_no_others(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path)
    program, (ours, *_) = list(config.program or ()), Container(config).name.rsplit("-", 3)
    left, other = f"{ours}-{2**22}-1-0", f"octetrl-another-machine-1-{2**22}-1-0"
    live = f"{ours}-{os.getpid()}-{begun(os.getpid())}-99999"
    for name in (left, other, live):
        words = ["run", "-d", "-i", "--name", name, "--label", LABEL, *config.options, "--network", "none", IMAGE]
        subprocess.run([*program, *words, "cat"], check=True, capture_output=True)
    try:
        assert set(sweep(config)) <= {left}  # or another test's process has removed it
        shown = subprocess.run([*program, "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True)
        assert set(shown.stdout.split()) & {left, other, live} == {other, live}
    finally:
        remove(config, [left, other, live])


def test_settings_are_the_recipes_with_changes_and_columns() -> None:
    task = Task("t", "x", metadata={"tag": 7})
    boxes = Boxes(BoxConfig(kind="podman", image="swe:{tag}-{id}", cpus=2.0))
    config = boxes.settings(task, {"network": "host", "options": ["--gpus", "all"]})
    assert (config.image, config.cpus, config.options) == ("swe:7-t", 2.0, ("--gpus", "all"))
    for changes in ({"image": "{other}"}, {"cpu": 2}):
        with pytest.raises(UserError):
            boxes.settings(task, changes)


def test_what_a_box_needs_is_said_before_it_is_used() -> None:
    for config in (
        BoxConfig(kind="bubblewrap", program=("no-such-bwrap",)),
        BoxConfig(kind="bubblewrap", image="/no/such/folder"),
        BoxConfig(kind="podman", program=("no-such-podman",), image="a"),
    ):
        with pytest.raises(BoxError):
            asyncio.run(open_box(config))


@pytest.mark.parametrize("kind", ENGINES)
def test_the_command_lines_of_an_engine(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their words are those of `docker run --help` and `docker exec --help`, of 28.2 and 20.10, and of podman 4.3."""
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    given = {"image": "swe:1", "cpus": 1.5, "memory_mib": 64, "network": "bridge", "options": ("--gpus", "all")}
    box = Container(BoxConfig(kind=kind, **given))
    limits = ["--network", "bridge", "--memory", "64m", "--pids-limit", "4096", "--cpus", "1.5", "--gpus", "all"]
    named = ["--name", box.name, "--label", "octetrl-box", "--entrypoint", "sh"]
    assert box.start_command() == [kind, "run", "-i", "--rm", *named, *limits, "swe:1", "-c", PAYLOAD]
    words = box.client(["a", "b c"], {"A": "b=c d"}, "me", reads=True)
    assert words == [kind, "exec", "-i", "--user", "me", "--env", "A=b=c d", box.name, "a", "b c"]
    assert box.client(["a"], {}, None, reads=False) == [kind, "exec", box.name, "a"]
