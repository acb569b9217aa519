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


def nothing() -> None:
    return None


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
    """Sets the Rays of the machine, all of which answer."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def put(*rays: LocalRay) -> None:
        monkeypatch.setattr(ray_address, "local_rays", lambda: iter(rays))
        monkeypatch.setattr(ray_address, "_check_answer", lambda *_: None)

    return put


def test_auto_joins_the_ray_that_no_run_started(machine: Callable[..., None]) -> None:
    machine(OF_A_RUN, OWN)
    assert address_to_join("auto", nothing) == OWN.address
    machine(OTHER, OWN)
    assert address_to_join("auto", lambda: OWN.address) == OWN.address  # of the last `ray start`
    machine()
    assert address_to_join("auto", lambda: OWN.address) == OWN.address  # in a container that sees no processes
    machine(OWN, OF_A_RUN)
    for gone in (OTHER.address, OF_A_RUN.address):  # Ray's own file may name a Ray that ended, or that of a run
        assert address_to_join("auto", lambda gone=gone: gone) == OWN.address


@pytest.mark.parametrize(
    ("rays", "message"),
    [
        ((), r"auto: no Ray runs on this machine; start one with `ray start --head"),
        ((OF_A_RUN,), r"no Ray runs on this machine but that of 1 other run of octetrl, which will end it; start one"),
        ((OWN, OTHER, OF_A_RUN), r"several Rays run on this machine; give one of 10\.0\.0\.1:6379, 10\.0\.0\.1:7000$"),
    ],
)
def test_auto_joins_nothing_else(rays: tuple[LocalRay, ...], message: str, machine: Callable[..., None]) -> None:
    machine(*rays)
    for last in (None, "10.0.0.1:9") if rays else (None,):  # of the last `ray start`, which has ended
        with pytest.raises(UserError, match=message) as refused:
            address_to_join("auto", lambda last=last: last)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1"])
def test_the_ray_of_another_run_is_refused_at_its_address_too(
    host: str, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(OF_A_RUN, OWN)
    message = rf"the Ray at {host}:7 belongs to another run of octetrl, which ends it; start one"
    with pytest.raises(UserError, match=message):
        address_to_join(f"{host}:7", nothing)
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:7")
    with pytest.raises(UserError, match=message):
        address_to_join("auto", nothing)
    assert address_to_join("10.0.0.2:7", nothing) == "10.0.0.2:7"  # another machine's


def test_a_ray_address_in_the_environment_is_host_and_port(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(OWN)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(UserError, match=r"auto, and RAY_ADDRESS: 'local' is not host:port"):
        address_to_join("auto", nothing)


def test_raylets_are_found_by_their_command_lines() -> None:
    for folder, is_of_a_run in (("/tmp/octetrl-xyz", True), ("/tmp/ray", False)):
        address = f"127.0.0.1:{1 + is_of_a_run}"
        options = [f"--session_dir={folder}/session_1", f"--gcs-address={address}"]
        command = ["/x/raylet", "-c", "print(flush=True); input()", *options]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe) as raylet:
            assert raylet.stdout is not None and raylet.stdout.readline()
            found = set(local_rays())
            raylet.kill()
        assert LocalRay(address, is_of_a_run) in found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"no Ray answers at 127.0.0.1:\d+ \(nothing came in 0 s\)"),
        (b"", r"what answers at 127.0.0.1:\d+ is not Ray; start one"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"what answers at 127.0.0.1:\d+ is not Ray; start one"),
        (SETTINGS, None),
    ],
)
def test_what_does_not_speak_rays_protocol_is_refused(
    answer: bytes | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself waits for an answer without a limit."""
    monkeypatch.setattr(ray_address, "CONNECT_SECONDS", 0.3 if answer is None else 120.0)
    with server(answer) as address:
        if message is None:
            assert address_to_join(address, nothing) == address
        else:
            with pytest.raises(UserError, match=message):
                address_to_join(address, nothing)


def test_with_tls_only_the_connection_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first frame would be encrypted."""
    with server(None) as address:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert address_to_join(address, nothing) == address
        monkeypatch.setenv("RAY_USE_TLS", "0")
        monkeypatch.setattr(ray_address, "CONNECT_SECONDS", 0.1)
        with pytest.raises(UserError, match="no Ray answers"):
            address_to_join(address, nothing)
