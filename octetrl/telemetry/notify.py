"""Messages of a run to a person: `logging.notify` names an address, a command, or both.

    {"event": "warning", "run": "mine", "folder": "/runs/mine", "step": 12, "text": "mine, step 12: ..."}

This JSON is posted to the webhook (Slack and Mattermost show its `text`), and is the command's standard input. Events
are `warning` (what the console warned of in a step), `failure` (an error ended the run) and `end`. A thread sends them,
so a step waits for none. One that can't be sent is counted and warned of, and never ends the run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from octetrl.config.schema import NotifyConfig
from octetrl.system.text import counted
from octetrl.telemetry.curves import short_reason
from octetrl.telemetry.ending import FAILED, ending_of, read_ending, read_where
from octetrl.telemetry.sinks import METRICS_FILE, last_step

CLOSING = 30.0  # seconds that a run waits at its end for messages that are not sent yet


def notify_problems(config: NotifyConfig | None) -> Iterator[str]:
    """What is missing on this machine: the variable with the address, or the command."""
    if config is not None and config.webhook is not None and not _address(config.webhook):
        yield f"logging.notify.webhook: '{config.webhook}' is no http address, and no variable that has one; set it"
    if config is not None and config.command and shutil.which(config.command[0]) is None:
        yield f"logging.notify.command: there is no program '{config.command[0]}'; install it, or give its path"


def _address(webhook: str) -> str | None:
    found = webhook if "://" in webhook else os.environ.get(webhook, "")
    return found if found.startswith(("http://", "https://")) else None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would follow it by GET, without the message, and report success."""

    def redirect_request(self, *_: Any, **__: Any) -> None: ...


_OPENER = urllib.request.build_opener(_NoRedirects)


class Notifier:
    """Sends the events that `config` asks for. warn: shows the first failure, and at the end their number."""

    def __init__(self, config: NotifyConfig, folder: Path, warn: Callable[[str], None]) -> None:
        self._config, self._folder, self._warn = config, folder, warn
        self._events: SimpleQueue[bytes | None] = SimpleQueue()
        self._failures: list[str] = []
        self._num_sent = self._num_taken = 0
        self._thread = Thread(target=self._work, name="octetrl-notify", daemon=True)
        self._thread.start()

    def send(self, event: str, text: str, step: int) -> None:
        if event in self._config.events:
            run = self._folder.name
            about = {"event": event, "run": run, "folder": str(self._folder), "step": step}
            self._events.put(json.dumps({**about, "text": f"{run}, step {step}: {text}"}).encode())

    def failures(self) -> list[str]:
        """What could not be sent since the last call."""
        new = self._failures[self._num_taken :]
        self._num_taken += len(new)
        return new

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Sends how the block ended, and waits until all is sent."""
        try:
            yield
        except BaseException as error:
            ending = ending_of(error)
            self._close("failure" if ending.how == FAILED else "end", ending.text)
            raise
        ending_read = read_ending(read_where(self._folder))
        self._close("end", ending_read.text if ending_read is not None else "finished")

    def _close(self, event: str, text: str) -> None:
        self.send(event, text, last_step(self._folder / METRICS_FILE))
        self._events.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self._warn(f"logging.notify: {counted(self._events.qsize(), 'message')} not sent after {CLOSING:.0f} s")
        if self._failures:
            self._warn(f"logging.notify: {len(self._failures)} of {counted(self._num_sent, 'message')} failed")

    def _work(self) -> None:
        while (body := self._events.get()) is not None:
            for send in (self._post, self._run):
                try:
                    self._num_sent += send(body)
                except Exception as error:  # of a network, or of a user's program: counted
                    self._num_sent += 1
                    self._failures.append(f"logging.notify: a message was not sent ({short_reason(error)})")
                    if len(self._failures) == 1:
                        self._warn(f"{self._failures[0]}; the run goes on")

    def _post(self, body: bytes) -> bool:
        address = _address(self._config.webhook or "")
        if address is None:
            return False
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=self._config.timeout_seconds):  # raises for a status from 300
            return True

    def _run(self, body: bytes) -> bool:
        if not self._config.command:
            return False
        quiet = subprocess.DEVNULL  # a pipe would also wait for programs that it left in the background
        with subprocess.Popen(
            self._config.command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        ) as program:
            try:
                program.communicate(body, self._config.timeout_seconds)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # with the programs that it started
                raise
        if program.returncode:
            raise subprocess.CalledProcessError(program.returncode, self._config.command)
        return True


@contextmanager
def notifying(
    config: NotifyConfig | None, folder: Path, warn: Callable[[str], None]
) -> Iterator[Callable[[int, Sequence[str]], list[str]]]:
    """Within, a run goes on. Gives what takes the warnings of a step, and returns them with those about messages."""
    if config is None:
        yield lambda step, texts: list(texts)
        return
    notifier = Notifier(config, folder, warn)

    def warned(step: int, texts: Sequence[str]) -> list[str]:
        if texts:
            notifier.send("warning", "; ".join(texts), step)
        return [*texts, *notifier.failures()]

    with notifier.until_end():
        yield warned
