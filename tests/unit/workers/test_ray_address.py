"""Which Ray a run joins: none of another run, and nothing that is not Ray. No Ray is started here."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from octetrl.system.errors import UserError
from octetrl.workers import ray_address
from octetrl.workers.ray_address import LocalRay, address_to_join, local_rays

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
OWN, OTHER, OF_A_RUN = LocalRay("10.0.0.1:6379", False), LocalRay("10.0.0.1:7000", False), LocalRay("10.0.0.1:7", True)
ENDED = "10.0.0.1:9"


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Answers each connection so and closes it; None: never says a word."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    connection = listener.accept()[0]
                    kept.append(connection)
                    if answer is not None:
                        connection.recv(100)
                        connection.sendall(answer)
                        connection.close()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the Rays of the machine, all of which answer, and RAY_ADDRESS."""

    def put(*rays: LocalRay, variable: str = "") -> None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
        monkeypatch.setattr(ray_address, "local_rays", lambda: iter(rays))
        monkeypatch.setattr(ray_address, "_check_answer", lambda *_: None)

    return put


def refusal_of(address: str, last: str | None = None) -> str:
    with pytest.raises(UserError) as refused:
        address_to_join(address, lambda: last)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("cluster.address: ")
    return str(refused.value)


@pytest.mark.parametrize(
    ("rays", "last"),
    [
        ((OF_A_RUN, OWN), None),
        ((OTHER, OWN), OWN.address),  # of the last `ray start`
        ((), OWN.address),  # in a container that sees no processes
        ((OWN, OF_A_RUN), OTHER.address),  # Ray's own file may name a Ray that ended, or that of a run
        ((OWN, OF_A_RUN), OF_A_RUN.address),
    ],
)
def test_auto_joins_the_ray_that_no_run_started(
    rays: tuple[LocalRay, ...], last: str | None, machine: Callable[..., None]
) -> None:
    machine(*rays)
    assert address_to_join("auto", lambda: last) == OWN.address


@pytest.mark.parametrize(
    ("rays", "last", "named"),
    [
        ((), None, "ray start --head"),
        ((OF_A_RUN,), None, "1 other run of octetrl"),
        ((OF_A_RUN,), ENDED, "1 other run of octetrl"),
        ((OWN, OTHER, OF_A_RUN), None, f"{OWN.address}, {OTHER.address}"),
        ((OWN, OTHER, OF_A_RUN), ENDED, f"{OWN.address}, {OTHER.address}"),
    ],
)
def test_auto_joins_nothing_else(
    rays: tuple[LocalRay, ...], last: str | None, named: str, machine: Callable[..., None]
) -> None:
    machine(*rays)
    assert named in refusal_of("auto", last)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1"])
def test_the_ray_of_another_run_is_refused_at_its_address_too(host: str, machine: Callable[..., None]) -> None:
    machine(OF_A_RUN, OWN, variable=f"{host}:7")
    assert "another run" in refusal_of(f"{host}:7") and "another run" in refusal_of("auto")
    assert address_to_join("10.0.0.2:7", lambda: None) == "10.0.0.2:7"  # another machine's


def test_a_ray_address_in_the_environment_is_host_and_port(machine: Callable[..., None]) -> None:
    machine(OWN, variable="local")
    assert "RAY_ADDRESS: 'local'" in refusal_of("auto")


def test_raylets_are_found_by_their_command_lines() -> None:
    for folder, is_of_a_run in (("/tmp/octetrl-xyz", True), ("/tmp/ray", False)):
        address = f"127.0.0.1:{1 + is_of_a_run}"
        options = [f"--session_dir={folder}/session_1", f"--gcs-address={address}"]
        command = ["/x/raylet", "-c", "print(flush=True); input()", *options]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe) as raylet:
            assert raylet.stdout is not None and raylet.stdout.readline()
            there = set(local_rays())
            raylet.kill()
        assert LocalRay(address, is_of_a_run) in there


@pytest.mark.parametrize(
    ("answer", "tls", "problem"),
    [
        (None, "0", "nothing came in 0 s"),
        (b"", "0", "is not Ray"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "0", "is not Ray"),
        (SETTINGS, "0", None),
        (None, "1", None),  # the first frame would be encrypted: only the connection is tried
    ],
)
def test_what_does_not_speak_rays_protocol_is_refused(
    answer: bytes | None, tls: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself waits for an answer without a limit."""
    monkeypatch.setenv("RAY_USE_TLS", tls)
    monkeypatch.setattr(ray_address, "CONNECT_SECONDS", 0.3 if answer is None else 120.0)
    with server(answer) as address:
        if problem is None:
            assert address_to_join(address, lambda: None) == address
        else:
            assert problem in refusal_of(address)
