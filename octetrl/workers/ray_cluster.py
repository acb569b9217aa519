"""Starts Ray on this machine, or joins a running cluster, and checks that it has what the recipe asks for.

A Ray that a run starts ends with it. Its files lie in a folder of /tmp with a short name, because a socket's path has
at most 107 bytes; a watcher (ray_watcher.py) removes the folder and what still runs, also when the run is killed. Its
logs are copied to the run folder. The dashboard is off, and nothing is reported to anybody. Ray's own token, a file in
the user's home, keeps other users of the machine out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
import ray._private.utils as ray_utils
import ray._private.worker as ray_worker
import torch
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from octetrl.config.cluster import ClusterConfig
from octetrl.config.in_words import lacking_gpus, local_lack
from octetrl.system.errors import RunFailed, Terminated, UserError
from octetrl.system.host import short_waits
from octetrl.system.process import terminable
from octetrl.workers import ray_watcher
from octetrl.workers.ray_address import FOLDER_PREFIX, REMEDY, address_to_join
from octetrl.workers.ray_daemons import Daemons

OBJECT_STORE_BYTES = 1 << 30  # shared memory for records on their way; a batch is tens of megabytes
LEAST_STORE_BYTES = 80 << 20  # that Ray accepts
WATCHER_SECONDS = 30.0


_WATCHERS: dict[int, int] = {}  # process of each watcher -> descriptor of its pipe


def stopped_at_once() -> None:
    """Tell the watchers that the user ends this process now, and has been told so. Called by a handler of a signal."""
    for pipe in _WATCHERS.values():
        with contextlib.suppress(OSError):
            os.write(pipe, ray_watcher.STOPPED)


@dataclass(slots=True)
class RayCluster:
    """A Ray that this process is connected to."""

    is_ours: bool  # connected by us, so that we disconnect
    folder: Path | None = None  # of a Ray that we started
    watcher: subprocess.Popen[bytes] | None = None
    daemons: Daemons | None = None  # of a Ray that we started

    def check(self) -> None:
        """Waits while a process of our Ray is stopped. Raises RayLost if one has died; no call of Ray may follow."""
        if self.daemons is not None:
            self.daemons.await_answer()

    @property
    def answers(self) -> bool:
        """Whether a call of Ray would not block."""
        return self.daemons is None or self.daemons.answer

    def close(self) -> None:
        """Disconnects, and ends a Ray that we started, also one that has lost a process."""
        answers = self.answers
        if self.daemons is not None:
            self.daemons.close()
            self.daemons = None
        if not answers:
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if self.is_ours:
            self.is_ours = False
            ray.shutdown()
        watcher = self.watcher
        if watcher is not None:
            self.dismiss_watcher()
            with contextlib.suppress(subprocess.TimeoutExpired):
                watcher.wait(WATCHER_SECONDS)

    def processes(self) -> list[int]:
        """Ids of the processes of a Ray that we started, except this one and the watcher."""
        if self.folder is None or self.watcher is None:
            return []
        return ray_watcher.processes_of(self.folder, exempt={os.getpid(), self.watcher.pid})

    def dismiss_watcher(self, word: bytes = ray_watcher.BYE) -> None:
        """Lets it remove what is left, without a line about our end."""
        watcher, self.watcher = self.watcher, None
        if watcher is not None and watcher.stdin is not None:
            _WATCHERS.pop(watcher.pid, None)
            with contextlib.suppress(OSError):
                watcher.stdin.write(word)
                watcher.stdin.close()


def connect(cluster: ClusterConfig, run_folder: Path | None) -> RayCluster:
    """A Ray with places for the workers. `run_folder` gets the logs of a Ray that is started here.

    Raises UserError before anything is built.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)  # what it warns of, it was told
    if hasattr(ray_worker, "print_to_stdstream"):  # no option of Ray turns it off. Its logs have what it would print
        ray_worker.print_to_stdstream = lambda *_, **__: None
    with terminable(), _own_sigterm():
        cluster_of_run = _start(cluster, run_folder) if cluster.address in (None, "local") else _join(cluster.address)
    try:
        _check_places(cluster)
    except BaseException:
        cluster_of_run.close()
        raise
    return cluster_of_run


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """A context around `ray.init`, which sets handlers of SIGTERM: first one that exits with the signal's number, then
    one of C++ that prints a stack. The first raises Terminated here, and afterwards the handler is the one before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        raise Terminated("SIGTERM") from error
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _start(cluster: ClusterConfig, run_folder: Path | None) -> RayCluster:
    lack = local_lack(cluster, torch.cuda.device_count())
    if lack is not None:
        raise UserError(lack)
    if ray.is_initialized():
        raise UserError("cluster.address: this process is connected to a Ray already; give cluster.address: auto")
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    watched = [str(folder)] if run_folder is None else [str(folder), str(run_folder)]
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", ray_watcher.__file__, *watched],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    if watcher.stdin is not None:
        _WATCHERS[watcher.pid] = watcher.stdin.fileno()
    started = RayCluster(is_ours=True, folder=folder, watcher=watcher)
    started.daemons = daemons = Daemons(cluster.deadlines.silent_seconds)
    guard = daemons.starting(started.processes, started.dismiss_watcher)
    try:
        with guard, _kept_stderr(), _environment({**variables_of_ray(), ray_watcher.MARK: str(folder)}):
            ray.init(
                address="local",
                num_cpus=cluster.num_workers,  # Ray starts as many idle processes
                num_gpus=cluster.num_gpus,
                object_store_memory=_store_bytes(),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(folder),
            )
    except Exception as error:
        started.close()
        why = daemons.why_not_started or str(error).strip().splitlines()[0]
        raise RunFailed(f"Ray did not start: {why}") from error
    except BaseException:
        started.close()
        raise
    return started


def variables_of_ray() -> dict[str, str]:
    """For the processes of a Ray that we start. Its own niceness for workers is 15."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return variables | short_waits(os.environ)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Ray's processes get these variables; what the run starts later does not, such as the processes of rewards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _store_bytes() -> int:
    """Half of the free shared memory at most. Records that do not fit go through files."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else OBJECT_STORE_BYTES
    return max(LEAST_STORE_BYTES, min(OBJECT_STORE_BYTES, free // 2))


def _join(address: str) -> RayCluster:
    if ray.is_initialized():
        return RayCluster(is_ours=False)
    address = address_to_join(address, ray_utils.read_ray_address)
    _use_token_of_user()
    token = "set RAY_AUTH_TOKEN_PATH to its token, or RAY_AUTH_MODE=disabled if it was started so"
    with _kept_stderr() as printed:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except AuthenticationError as error:
            raise UserError(f"cluster.address: the Ray at {address} wants its token; {token}") from error
        except ConnectionError as error:
            if "InvalidAuthToken" in printed():
                raise UserError(f"cluster.address: the Ray at {address} wants another token; {token}") from error
            raise UserError(f"cluster.address: no Ray answers at {address}; {REMEDY}") from error
        except RuntimeError as error:
            if "ersion mismatch" in str(error):
                raise UserError(other_versions(address, error)) from error
            raise UserError(f"cluster.address: no Ray answers at {address} ({_one_line(error)}); {REMEDY}") from error
    return RayCluster(is_ours=True)


def _use_token_of_user() -> None:
    """`ray start` asks for the token in the user's home if there is one. Ray uses it at `auto`, and at no other
    address."""
    with contextlib.suppress(ImportError):  # an older Ray has no tokens
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _kept_stderr() -> Iterator[Callable[[], str]]:
    """Keeps what is printed to stderr, also by libraries. It is shown at the end, unless an exception passes."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, contextlib.ExitStack() as stack:
        real = os.dup(2)
        stack.callback(os.close, real)
        stack.callback(os.dup2, real, 2)
        os.dup2(kept.fileno(), 2)

        def printed() -> str:
            sys.stderr.flush()
            kept.seek(0)
            return kept.read().decode(errors="replace")

        yield printed
        os.write(real, printed().encode())


def other_versions(address: str, error: RuntimeError) -> str:
    """Say that the cluster has another Ray or Python. `error`: Ray's, which lists the cluster's before ours."""
    theirs = " and ".join(" ".join(pair) for pair in re.findall(r"\b(Ray|Python): (\S+)", str(error))[:2])
    ours = f"Ray {ray.__version__} and Python {'.'.join(map(str, sys.version_info[:3]))}"
    return (
        f"cluster.address: the cluster at {address} has {theirs or _one_line(error)}, this machine has {ours}; install"
        " the same on both"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_places(cluster: ClusterConfig) -> None:
    """Waits for machines that join late, and for GPUs of workers that have just ended. Raises UserError."""
    until = time.monotonic() + cluster.deadlines.machines_seconds
    while (lack := _lack(cluster)) is not None:
        if time.monotonic() > until:
            raise UserError(lack)
        time.sleep(0.1)


def _lack(cluster: ClusterConfig) -> str | None:
    """What the running Ray has too little of; None: it has all that the workers need."""
    wanted = cluster.num_gpus
    there, free = (int(now.get("GPU", 0)) for now in (ray.cluster_resources(), ray.available_resources()))
    if there < wanted:
        return lacking_gpus(cluster, there, "the Ray cluster", "add machines with GPUs")
    if free < wanted:
        return (
            f"cluster.gpus: {wanted} were asked for, {free} of the Ray cluster's {there} are free; wait for the others,"
            " or lower it"
        )
    if cluster.nodes is None or cluster.per_node is None:
        return None
    kind = _kind(cluster)
    alive = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
    large = sum(number >= cluster.per_node for number in alive)
    if large >= cluster.nodes:
        return None
    return (
        f"cluster.nodes: {cluster.nodes} machines with {cluster.per_node} {kind}s were asked for, the Ray cluster has"
        f" {large}; start Ray on the others (cluster.deadlines.machines_seconds waits for them), lower one of the two,"
        f" or give cluster.{kind.lower()}s alone"
    )


def _kind(cluster: ClusterConfig) -> str:
    """Ray's name of what a worker takes."""
    return "GPU" if cluster.num_gpus else "CPU"


def reserve_nodes(cluster: ClusterConfig) -> PlacementGroup:
    """Places on so many machines. Raises UserError if they are not free in time: Ray itself waits without a limit."""
    kind, seconds = _kind(cluster), cluster.deadlines.machines_seconds
    places = placement_group([{kind: cluster.per_node}] * (cluster.nodes or 1), strategy="STRICT_SPREAD")
    if not places.wait(max(1, round(seconds))):
        remove_placement_group(places)
        raise UserError(
            f"cluster.nodes: the Ray cluster has no {cluster.nodes} machines with {cluster.per_node} free {kind}s each"
            f" after {seconds:g} s (cluster.deadlines.machines_seconds), because other programs use some; wait for"
            f" them, lower one of the two, or give cluster.{kind.lower()}s alone"
        )
    return places
