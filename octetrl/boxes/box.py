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
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from octetrl.boxes.loop import Kept, Process, on_loop
from octetrl.boxes.relay import listen_in, relay_from
from octetrl.process.command import CommandResult

if TYPE_CHECKING:  # pydantic takes as long to import as a reward process takes to start
    from octetrl.config.box import BoxConfig

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
_SHORT_BYTES = 1000  # of what a box itself says
_START_SECONDS = 600.0  # the image may have to be pulled
_END_SECONDS = 10.0
_KILL_SECONDS = 20.0
_FILE_SECONDS = 600.0
_LATE_SECONDS = 1.0  # for output that arrives behind the exit code, or has a background process as its writer
_LOST_SECONDS = 3.0  # from the end of a command that a killed box takes with it to the end of the box's process
_NOT_RUN = range(125, 128)  # exit codes of a client that could not start the command


class BoxError(RuntimeError):
    """A box can't be started or is lost. The rollout ends as `box_error`, without a reward."""


def program_of(config: BoxConfig) -> list[str]:
    """The command that makes such boxes. Raises BoxError if it is not installed."""
    program = config.program or ("bwrap" if config.kind == "bubblewrap" else config.kind,)
    if shutil.which(program[0]) is None:
        raise BoxError(f"{program[0]} is not installed; install it, or choose another environment.box.kind")
    return list(program)


class Box:
    """One box, from `open_box` to `close`. Any thread and any event loop may use it.

    What follows an underscore and is async runs on the loop of boxes, and so has no races with other such."""

    def __init__(self, config: BoxConfig) -> None:
        self.config = config
        self.lost: str | None = None  # why it is lost
        self.descriptors: tuple[int, ...] = ()  # that clients inherit
        self._process: Process | None = None
        self._relay: asyncio.Server | None = None
        self._ending: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ what makes it

    def start_command(self) -> list[str]:
        """The command whose process is the box."""
        raise NotImplementedError

    def started(self) -> None:
        """Called when the first process runs. Raises OSError."""

    def client(self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool) -> list[str]:
        """A command of this machine that runs `command` in the box. reads: it passes its input on."""
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
        code, out, err = await on_loop(self._run(command, cwd, env, user, data, seconds, output_bytes))
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
        if self._ending is not None or self._process is None:
            return False
        if self.lost is None and self._process.code is not None:
            self.lost = f"the box ended while it was in use ({self._last_words(self._process)})"
        return self.lost is None

    async def forward(self, port: int) -> None:
        """Let programs in the box reach 127.0.0.1:`port` of this machine under that address. Raises BoxError."""
        if self.config.network == "host" or self._relay is not None:
            return
        self._check_alive()
        try:
            listening = await asyncio.to_thread(lambda: listen_in(self.find_pid(), port))
            self._relay = await on_loop(relay_from(listening, port))
        except (OSError, subprocess.SubprocessError) as error:
            how = "give environment.box.network: host, or run as root"
            raise BoxError(f"the box can't be connected with the policy: {error}; {how}") from error

    async def close(self) -> None:
        """End the box and everything in it, also if the awaiting task is cancelled meanwhile."""
        await on_loop(self._close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ its process

    async def start(self) -> None:
        """On the loop of boxes, before all else. Raises BoxError; then `close` it."""
        try:
            self._process = process = await Process.start(self.start_command(), stdin=None, most=_SHORT_BYTES)
            await process.within(_START_SECONDS, lambda: _READY in process.out.data or process.has_ended)
            if _READY not in process.out.data:
                raise OSError(self._last_words(process))
            self.started()
        except OSError as error:
            raise BoxError(f"the box did not start: {error}") from error

    async def _close(self) -> None:
        self._ending = self._ending or asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._relay is not None:
            self._relay.close()
        ended_by_itself = True
        if (process := self._process) is not None:
            process.input.close()
            await process.within(_END_SECONDS, lambda: process.has_ended)
            ended_by_itself = process.code == 0
            await process.end()
        await asyncio.to_thread(self.clean, ended_by_itself=ended_by_itself)

    def _check_alive(self) -> None:
        if not self.alive():
            raise BoxError(self.lost or "the box is closed")

    def _last_words(self, process: Process) -> str:
        return " ".join(process.err.text().split())[-300:] or f"exit code {process.code}"

    # ------------------------------------------------------------ its commands

    async def _run(
        self,
        command: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str],
        user: str | None,
        stdin: bytes,
        seconds: float,
        most: int,
    ) -> tuple[int | None, Kept, Kept]:
        self._check_alive()
        word = secrets.token_hex(8)
        own = {**self.config.env, **env, _VARIABLE: word}
        wrapped = ["sh", "-c", _WRAPPER, "sh", word, cwd or "", *command]
        try:
            client = await self._client(wrapped, own, user, stdin, most, word)
        except ValueError as error:  # a command that can't be run, as a shell would say it, is no lost box
            err = Kept(most)
            err.add(f"{command[0]}: {error}\n".encode("utf-8", "replace"))
            return _NOT_RUN.start + 1, Kept(most), err
        has_ended = False
        try:
            has_ended = await client.within(seconds, lambda: client.err.code is not None or client.has_ended)
            await client.within(_LATE_SECONDS if has_ended else 0.0, lambda: 1 not in client.open_streams)
        finally:
            if not has_ended:
                await self._kill(word, user)
            await client.end()
        if has_ended and client.err.code is None:
            client.err.code = await self._code_of_cut(client)
        return (client.err.code if has_ended else None), client.out, client.err

    async def _client(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        user: str | None,
        stdin: bytes = b"",
        most: int = _SHORT_BYTES,
        word: str | None = None,
    ) -> Process:
        """Raises BoxError, and ValueError for a command that can't be run."""
        if self._ending is not None:
            raise BoxError(self.lost or "the box is closed")
        words = self.client(command, env, user, reads=bool(stdin))
        try:
            return await Process.start(words, stdin=stdin, most=most, word=word, descriptors=self.descriptors)
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise ValueError(error.strerror) from error
            raise BoxError(f"{words[0]}: {error}") from error

    async def _code_of_cut(self, client: Process) -> int:
        """The exit code of a client whose command has said none. Raises BoxError if it is not the command's matter."""
        process, code = self._process, client.code
        assert process is not None and code is not None
        answers = await self._ask(["sh", "-c", "echo yes"], None, _END_SECONDS) == b"yes\n"
        await process.within(0.0 if answers else _LOST_SECONDS, lambda: process.has_ended)
        self._check_alive()
        if answers and (code in _NOT_RUN or 128 < code < 192):  # it does not start, or has killed the shell above it
            return code
        said = " ".join(client.err.text().split())[-200:]
        self.lost = f"the connection to a command in the box was cut (exit code {code}{f': {said}' if said else ''})"
        raise BoxError(self.lost)

    async def _kill(self, word: str, user: str | None) -> None:
        """End a command with all its descendants, or else the box."""
        with contextlib.suppress(BoxError):  # it ends with the box
            ended = await self._ask(["sh", "-c", _KILL, "sh", word], user, _KILL_SECONDS) == b"ended\n"
            if not ended and self.alive():
                self.lost = "a command in the box could not be ended"
                await self._close()

    async def _ask(self, command: Sequence[str], user: str | None, seconds: float) -> bytes:
        """What a short command prints."""
        client = await self._client(command, {}, user)
        try:
            return bytes(client.out.data) if await client.within(seconds, lambda: client.has_ended) else b""
        finally:
            await client.end()

    async def _file(self, command: Sequence[str], path: str, data: bytes) -> bytes:
        code, out, err = await on_loop(self._run(command, None, {}, None, data, _FILE_SECONDS, FILE_BYTES))
        if code != 0:
            raise OSError(f"{path}: {err.text().strip() or f'exit code {code}'}")
        if out.left_out:
            raise OSError(f"{path}: the file is larger than {FILE_BYTES} bytes")
        return bytes(out.data)


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
