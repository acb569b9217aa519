"""The report of runs, served while they go on. No torch.

    GET /          the report page, with a script that asks for it again and shows what is new
    GET /metrics   the last step of each run as gauges, for Prometheus

The page is computed when a file of a run has changed, once for all who ask. Its ETag names the files' state.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octetrl.run.folder.layout import is_held
from octetrl.server.meters import run_meters
from octetrl.system.errors import UserError
from octetrl.system.text import to_utf8
from octetrl.telemetry.charts import escape
from octetrl.telemetry.ending import FAILED, FINISHED, as_written
from octetrl.telemetry.report import report_page
from octetrl.telemetry.report_data import RunRecord, read_run
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE, WARNINGS, last_step

_FILES = (METRICS_FILE, RUN_FILE, WARNINGS, ROLLOUTS, EVALUATIONS)
_LOCAL = ["localhost", "127.0.0.1", "[::1]"]
SCRIPT = """
let tag = "";
async function look() {
  let said = "the server does not answer";
  try {
    const answer = await fetch("/", {headers: {"If-None-Match": tag}});
    if (answer.status === 200) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (tag || page.querySelector("main").innerHTML !== document.querySelector("main").innerHTML)
        for (const part of ["h1", ".keys", "main"])
          document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
      document.title = page.title;
      tag = answer.headers.get("ETag");
    }
    if (answer.ok || answer.status === 304) said = answer.headers.get("X-Runs");
    else said = "the report can't be made: see where octetrl watch runs";
  } catch (error) {}
  document.querySelector(".live").textContent = said;
  setTimeout(look, 3000);
}
look();
"""


class Watched:
    """The runs in `folders`, read again when their files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = folders, Lock()
        self._tag, self._page = "", b""

    def page(self) -> tuple[str, bytes]:
        """The page and its ETag. Raises UserError for files that no run wrote."""
        with self._lock, as_written("' or '".join(map(str, self._folders))):
            tag = f'"{abs(hash(tuple(self._states()))):x}"'
            if tag != self._tag:
                self._page = to_utf8(_page(self.records(), [one for one in self._folders if not _has_step(one)]))
                self._tag = tag
            return self._tag, self._page

    def says(self) -> str:
        """What each run does, in a few words."""
        return "; ".join(f"{folder.resolve().name}: {_state(folder)}" for folder in self._folders)

    def records(self) -> list[RunRecord]:
        return [read_run(folder) for folder in self._folders if _has_step(folder)]

    def metrics(self) -> bytes:
        rows, records = [], self.records()
        names = Counter(run.name for run in records)
        for run in records:
            live = {"live": float(is_held(run.folder)), "warnings": float(len(run.warnings))}
            ended = run.ending.how if run.ending is not None else ""
            name = run.name if names[run.name] == 1 else str(run.folder)
            rows.append((name, {**run.rows[-1], **live, "failed": ended == FAILED, "finished": ended == FINISHED}))
        return run_meters(rows)

    def _states(self) -> Iterator[object]:
        for folder in self._folders:
            for name in _FILES:
                path = folder / name
                yield (state.st_mtime_ns, state.st_size) if path.exists() and (state := path.stat()) else None


def _has_step(folder: Path) -> bool:
    return last_step(folder / METRICS_FILE) > 0


def _state(folder: Path) -> str:
    if not folder.is_dir():
        return "removed"
    step = f"step {last_step(folder / METRICS_FILE)}" if _has_step(folder) else "no step yet"
    return f"{step}, running" if is_held(folder) else step


def _page(runs: Sequence[RunRecord], waiting: Sequence[Path]) -> str:
    """The report of the runs with a step, above it the names of the others."""
    says = {True: "has no finished step yet", False: "was removed"}
    lines = "".join(f"<p>{escape(one.resolve().name)} {says[one.is_dir()]}.</p>" for one in waiting)
    return report_page(runs, SCRIPT).replace("<main>", f"<main>{lines}", 1)


def watch_app(folders: Sequence[Path], *, local_name: str | None) -> Starlette:
    """local_name: the address, if only this machine reaches it; a page of another name that leads here is refused."""
    watched = Watched(folders)

    def page(request: Request) -> Response:
        try:
            tag, content = watched.page()
        except UserError as error:
            return Response(f"{error}\n", 500, media_type="text/plain")
        said = watched.says().encode("ascii", "replace").decode()
        headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Runs": said}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="text/html", headers=headers)

    def metrics(request: Request) -> Response:
        return Response(watched.metrics(), media_type="text/plain; version=0.0.4")

    hosts = [*_LOCAL, *([] if local_name is None else [local_name.lower()])]
    guard = [] if local_name is None else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    return Starlette(routes=[Route("/", page), Route("/metrics", metrics)], middleware=guard)


def serve_watch(app: Starlette, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listening])
