"""`octetrl watch`: the report of runs in a browser while they go on, and their metrics for Prometheus."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from octetrl.run.folder.layout import LOCK, RECIPE_FILE
from octetrl.system.errors import UserError, nearest_file, refuse_empty, runs_in
from octetrl.telemetry.sinks import METRICS_FILE


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8700,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Allow other machines: there is no key, and pages show rollouts.")
    ] = False,
) -> None:
    """Serve the report of runs while they go on, and /metrics for Prometheus."""
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise UserError(f"octetrl watch needs the package '{package}'; pip install 'octetrl[serve]'")
    for run in runs:
        refuse_empty(run, "run", "the folder of a run")
        folder = Path(run)
        if not any((folder / name).is_file() for name in (RECIPE_FILE, METRICS_FILE, LOCK)):
            hint = runs_in(folder) if folder.is_dir() else "" if folder.exists() else nearest_file(folder)
            raise UserError(f"watch: '{run}' holds no run; give the folder of a run{hint}")
    from octetrl.server.address import bound, is_of_this_machine, url_of
    from octetrl.server.watch import serve_watch, watch_app

    is_local = is_of_this_machine(host)
    if not is_local and not without_key:
        raise UserError(
            f"--host: '{host}' allows access from other machines; listen on 127.0.0.1, or give --without-key if"
            " something else keeps strangers out"
        )
    with bound(host, port) as listening:
        typer.echo(f"watching at {url_of(host, listening.getsockname()[1], '/')}", err=True)
        serve_watch(watch_app([Path(run) for run in runs], local_name=host if is_local else None), listening)
