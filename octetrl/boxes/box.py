"""A box: an isolated file system in which commands run, whatever makes it.

    box = await open_box(BoxConfig(kind="podman", image="python:3.12"))
    result = await box.run(["python", "-m", "pytest"], cwd="/repo", seconds=600)     # CommandResult
    await box.put("/repo/x.py", b"..."); text = await box.get("/repo/x.py")
    shell = box.shell(cwd="/repo"); await shell.run("export A=1; cd src"); await shell.run("echo $A; pwd")
    await box.close()

**A box is a process of this machine**: `docker run`, `podman run` or `bwrap`, in the foreground. The first process in
the box waits for the end of its input, a pipe of the run. When the run ends, however it does, that pipe closes, and
with it the box and everything in it. When the box ends, that process does, so `alive` is known at once.

**A command's exit code is what a shell in the box says**, behind a secret word. If the connection to a command is cut,
or the box is killed, there is no code, and BoxError is raised: a failure of the machine is never taken for a failed
command. What the client of a container returns counts only where the box still answers, and says that the command did
not start or that this shell was killed. A command that exceeds its time is ended with all its descendants, which are
found in the box by a variable of their environment; the box goes on, or is lost if they can't be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import secrets
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Self, TypeVar

from octetrl.boxes.relay import Relay, open_namespaces
from octetrl.config.box import BoxConfig
from octetrl.process.command import CommandResult

OUTPUT_BYTES = 1 << 20  # of each stream of a command: more is left out in the middle
MOST_PROCESSES = 4096  # in a box
FILE_BYTES = 1 << 28  # that `get` reads: what a box holds may never end
_READY = b"octetrl"
# The box's first process: a shell that no signal from inside ends, that reaps, and that waits for the end of its input.
PAYLOAD = f"cat </dev/null && echo {_READY.decode()} && while :; do cat >/dev/null && exit; done"
_VARIABLE = "OCTETRL_COMMAND"
_WRAPPER = r"""t=$1; d=$2; shift 2
if [ -z "$d" ] || cd "$d"; then "$@"; else (exit 126); fi
printf '\n%s %d\n' "$t" "$?" >&2"""
_KILL = f"""while p=$(grep -ls "{_VARIABLE}=$1" /proc/[0-9]*/environ; echo .); [ "$p" != . ]; do for p in $p; do
p=${{p#/proc/}}; kill -9 "${{p%/environ}}" 2>/dev/null
done; done; echo ended"""
_CHUNK = 1 << 16
_START_SECONDS = 600.0  # the image may have to be pulled
_END_SECONDS = 10.0
_KILL_SECONDS = 20.0
_LATE_SECONDS = 1.0  # for output that arrives behind the exit code, or has a background process as its writer
_LOST_SECONDS = 3.0  # from the end of a command that a killed box takes with it to the end of the box's process
_NOT_RUN = range(125, 128)  # exit codes of a client that could not start the command

_Result = TypeVar("_Result")


class BoxError(RuntimeError):
    """A box can't be started or is lost. The rollout ends as `box_error`, without a reward."""


class Box:
    """One box, from `open_box` to `close`. Any thread and any event loop may use it."""

    client_env: Mapping[str, str] | None = None  # of `client`, None: the run's

    def __init__(self, config: BoxConfig) -> None:
        self.config = config
        self.lost: str | None = None  # why it is lost
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the box
        self._relay: Relay | None = None
        self._lock, self._is_closed = threading.Lock(), False

    # ------------------------------------------------------------ what makes it

    def start_command(self) -> tuple[list[str], list[int]]:
        """The command whose process is the box, and descriptors that it inherits. Its input and output are pipes."""
        raise NotImplementedError

    def started(self) -> None:
        """Called when the first process runs."""

    def client(
        self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool
    ) -> tuple[list[str], list[int]]:
        """A command of this machine that runs `command` in the box, and descriptors that it inherits. reads: it passes
        its input on."""
        raise NotImplementedError

    def find_pid(self) -> int:
        """The first process of the box, as this machine numbers it. Raises OSError."""
        raise NotImplementedError

    def clean(self, *, ended_by_itself: bool) -> None:
        """Remove what is left when the box's process has ended."""

    # ------------------------------------------------------------ its use

    async def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
        user: str | None = None,
        stdin: str = "",
        seconds: float = 3600.0,
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a command to its end. cwd: None: the image's own, or /work. user: None: the image's own.
        output_bytes: of each stream, whose middle is left out if it has more. After `seconds` the result has no code
        and `stopped` is "wall_timeout". Raises BoxError."""
        data = stdin.encode("utf-8", "surrogatepass")
        call = functools.partial(self._run, command, cwd, env, user, data, seconds, output_bytes)
        code, out, err = await _in_thread(call)
        return CommandResult(code, out.text(), err.text(), "wall_timeout" if code is None else None)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it. Raises OSError, BoxError."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
        await self._file(["sh", "-c", script, "sh", path], path, data)

    async def get(self, path: str) -> bytes:
        """Read a file of at most `FILE_BYTES`. Raises OSError, BoxError."""
        return await self._file(["head", "-c", str(FILE_BYTES + 1), "--", path], path, b"")

    def shell(self, *, cwd: str | None = None, user: str | None = None) -> Shell:
        return Shell(self, cwd, user)

    def alive(self) -> bool:
        if self._is_closed or self._process is None:
            return False
        if self.lost is None and self._process.poll() is not None:
            self.lost = f"the box ended while it was in use ({self._last_words()})"
        return self.lost is None

    async def forward(self, port: int) -> None:
        """Let programs in the box reach 127.0.0.1:`port` of this machine under that address. Raises BoxError."""
        if self.config.network != "host" and self._relay is None:
            await _in_thread(lambda _: self._forward(port))

    async def close(self) -> None:
        await _in_thread(lambda _: self.end())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ in threads

    def start(self) -> None:
        command, descriptors = self.start_command()
        with self._lock:
            if self._is_closed:
                return
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise BoxError(f"the box did not start: {error}") from error
        assert self._process.stdout is not None
        timer = threading.Timer(_START_SECONDS, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line.strip() != _READY:
            self._process.wait()
            raise BoxError(f"the box did not start: {self._last_words()}")
        try:
            self.started()
        except OSError as error:
            raise BoxError(f"the box did not start: {error}") from error

    def end(self) -> None:
        """End the box and everything in it. Does nothing the second time."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._relay is not None:
            self._relay.close()
        process = self._process
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.clean(ended_by_itself=process is None or process.returncode == 0)
        self._said.close()

    def _run(
        self,
        command: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str],
        user: str | None,
        stdin: bytes,
        seconds: float,
        most: int,
        cancelled: int,
    ) -> tuple[int | None, _Kept, _Kept]:
        self._check_alive()
        word = secrets.token_hex(8)
        own = {**self.config.env, **env, _VARIABLE: word}
        wrapped = ["sh", "-c", _WRAPPER, "sh", word, cwd or "", *command]
        out, err = _Kept(most), _Kept(most, word)
        try:
            client = self._client(wrapped, own, user, reads=bool(stdin))
        except ValueError as error:  # a command that can't be run, as a shell would say it, is no lost box
            err.add(f"{command[0]}: {error}\n".encode("utf-8", "replace"))
            return _NOT_RUN.start + 1, out, err
        has_ended = False
        try:
            has_ended = _follow(client, stdin, out, err, time.monotonic() + seconds, cancelled)
        finally:
            if not has_ended:
                self._kill(word, user)
            _end_client(client)
        if has_ended and err.code is None:
            err.code = self._code_of_cut(client.returncode, err)
        return (err.code if has_ended else None), out, err

    def _client(
        self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool = False
    ) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        with self._lock:  # descriptors are not closed meanwhile, and their numbers not used for others
            if self._is_closed:
                raise BoxError(self.lost or "the box is closed")
            words, descriptors = self.client(command, env, user, reads=reads)
            try:
                return subprocess.Popen(
                    words,
                    stdin=pipe if reads else subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    env=self.client_env,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise ValueError(error.strerror) from error
                raise BoxError(f"{words[0]}: {error}") from error

    def _code_of_cut(self, code: int, err: _Kept) -> int:
        """The exit code of a client whose command has said none. Raises BoxError if it is not the command's matter."""
        assert self._process is not None
        answers = self._ask(["sh", "-c", "echo yes"], None) == b"yes\n"
        if not answers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOST_SECONDS)
        self._check_alive()
        if answers and (code in _NOT_RUN or 128 < code < 192):  # it does not start, or has killed the shell above it
            return code
        said = " ".join(err.text().split())[-200:]
        self.lost = f"the connection to a command in the box was cut (exit code {code}{f': {said}' if said else ''})"
        raise BoxError(self.lost)

    def _kill(self, word: str, user: str | None) -> None:
        """End a command with all its descendants, or else the box."""
        with contextlib.suppress(BoxError):  # it ends with the box
            ended = self._ask(["sh", "-c", _KILL, "sh", word], user, seconds=_KILL_SECONDS) == b"ended\n"
            if not ended and self.alive():
                self.lost = "a command in the box could not be ended"
                self.end()

    def _ask(self, command: Sequence[str], user: str | None, seconds: float = _END_SECONDS) -> bytes:
        """What a short command prints."""
        client = self._client(command, {}, user)
        try:
            return client.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return b""
        finally:
            _end_client(client)

    def _forward(self, port: int) -> None:
        self._check_alive()
        namespaces: list[int] = []
        try:
            namespaces = open_namespaces(self.find_pid(), ("user", "net"))
            self._relay = Relay(namespaces, port)
        except (OSError, subprocess.SubprocessError) as error:
            how = "give environment.box.network: host, or run as root"
            raise BoxError(f"the box can't be connected with the policy: {error}; {how}") from error
        finally:
            for descriptor in namespaces:
                os.close(descriptor)

    async def _file(self, command: Sequence[str], path: str, data: bytes) -> bytes:
        call = functools.partial(self._run, command, None, {}, None, data, 600.0, FILE_BYTES)
        code, out, err = await _in_thread(call)
        if code != 0:
            raise OSError(f"{path}: {err.text().strip() or f'exit code {code}'}")
        if out.is_cut:
            raise OSError(f"{path}: the file is larger than {FILE_BYTES} bytes")
        return bytes(out.data)

    def _check_alive(self) -> None:
        if not self.alive():
            raise BoxError(self.lost or "the box is closed")

    def _last_words(self) -> str:
        assert self._process is not None
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 1000))
        said = " ".join(self._said.read().decode("utf-8", "replace").split())
        return said[-300:] or f"exit code {self._process.returncode}"


class Shell:
    """A shell in a box whose directory and variables stay from command to command. Functions and options do not.

    Each command has a shell of its own, which begins with the state that the last one left. One that exceeds its time
    is ended and leaves the state as it was. Two commands at once share no state."""

    def __init__(self, box: Box, cwd: str | None, user: str | None) -> None:
        self._box, self._user = box, user
        self._state = f"/tmp/.octetrl-{secrets.token_hex(6)}"
        self._cwd = cwd

    async def run(self, command: str, *, seconds: float = 600.0, output_bytes: int = OUTPUT_BYTES) -> CommandResult:
        """Run lines of a shell; bash, or sh if the box has none. stdout has both streams. Raises BoxError."""
        find = 'if command -v bash >/dev/null; then exec bash "$@"; else exec sh "$@"; fi'
        words = ["sh", "-c", find, "sh", "-c", _SHELL, "sh", self._state, command]
        return await self._box.run(words, cwd=self._cwd, user=self._user, seconds=seconds, output_bytes=output_bytes)


# `set -a` exports every variable, so `export -p` has them all, in a form that each shell can read.
_SHELL = f"""exec 2>&1
[ -f "$1" ] && . "$1" >/dev/null 2>&1 && cd "$PWD"
octetrl_state=$1
trap 'unset {_VARIABLE}; export PWD; export -p >"$octetrl_state.new" && mv "$octetrl_state.new" "$octetrl_state"' EXIT
set -a
eval "$2"
"""


class _Kept:
    """The first and the last bytes of a stream. word: the word before the exit code, where the stream ends."""

    def __init__(self, most: int, word: str | None = None) -> None:
        self.data = bytearray()
        self.code: int | None = None
        self._most, self._left_out = most, 0
        self._pattern = None if word is None else re.compile(rb"\n%s (\d+)\n" % word.encode())

    def add(self, new: bytes) -> None:
        start = max(0, len(self.data) - 64)
        self.data += new
        if self._pattern is not None and (found := self._pattern.search(self.data, start)):
            self.code = int(found[1])
            del self.data[found.start() :]
        if len(self.data) > 2 * self._most:
            self._trim(self._most)

    @property
    def is_cut(self) -> bool:
        return bool(self._left_out) or len(self.data) > self._most

    def text(self) -> str:
        most = self._most
        if not self.is_cut:
            return self.data.decode("utf-8", "replace")
        self._trim(most)
        first, last = self.data[: most // 2], self.data[most // 2 :]
        said = f"\n[{self._left_out:,} bytes left out]\n"
        return first.decode("utf-8", "replace") + said + last.decode("utf-8", "replace")

    def _trim(self, most: int) -> None:
        more = len(self.data) - most
        if more > 0:
            self._left_out += more
            del self.data[most // 2 : most // 2 + more]


def _follow(
    client: subprocess.Popen[bytes], stdin: bytes, out: _Kept, err: _Kept, deadline: float, cancelled: int
) -> bool:
    """Feed the client and read it to the end of its command. Returns False if the time is over, or it is cancelled."""
    assert client.stdout is not None and client.stderr is not None
    pending, late = memoryview(stdin), float("inf")
    with selectors.DefaultSelector() as selector:
        selector.register(cancelled, selectors.EVENT_READ)
        for stream, kept in ((client.stdout, out), (client.stderr, err)):
            selector.register(stream, selectors.EVENT_READ, kept)
        if client.stdin is not None:
            os.set_blocking(client.stdin.fileno(), False)
            selector.register(client.stdin, selectors.EVENT_WRITE)
        open_streams = 2
        while open_streams and time.monotonic() < late:
            if (now := time.monotonic()) >= deadline:
                return False
            for key, _ in selector.select(min(deadline, late) - now):
                if key.fileobj == cancelled:
                    return False
                if key.data is None:
                    pending = pending[_write(key.fd, pending) :]
                    if not pending:
                        selector.unregister(key.fileobj)
                        assert client.stdin is not None
                        client.stdin.close()
                    continue
                new = os.read(key.fd, _CHUNK)
                key.data.add(new)
                if not new or (key.data is err and err.code is not None):
                    selector.unregister(key.fileobj)
                    open_streams -= 1
            if err.code is not None and late == float("inf"):
                late = time.monotonic() + _LATE_SECONDS
    if err.code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(max(0.0, deadline - time.monotonic()))
        return client.poll() is not None
    return True


def _end_client(client: subprocess.Popen[bytes]) -> None:
    """What it has started in the box may hold its streams for longer."""
    client.kill()
    client.wait()
    for stream in (client.stdout, client.stderr, client.stdin):
        if stream is not None:
            with contextlib.suppress(OSError):  # input that was not read
                stream.close()


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data[:_CHUNK])
    except BlockingIOError:
        return 0
    except BrokenPipeError:  # it reads no more
        return len(data)


async def _in_thread(call: Callable[[int], _Result]) -> _Result:
    """`call` in a thread, with a descriptor that becomes readable when the awaiting task is cancelled."""
    reads, writes = os.pipe()

    def run() -> _Result:
        try:
            return call(reads)
        finally:
            os.close(reads)

    try:
        return await asyncio.to_thread(run)
    finally:
        os.close(writes)  # the end of the pipe is readable too
