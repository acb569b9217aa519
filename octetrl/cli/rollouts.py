"""`octetrl rollouts`: shows what a run sampled, in the terminal, as an HTML page or as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.out_file import refuse_file, whole_file
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError, nearest, refuse_empty
from octetrl.telemetry.rollout_reader import Filter, Interval, matching_rows, select
from octetrl.telemetry.rollouts import EVALUATIONS

if TYPE_CHECKING:
    from octetrl.telemetry.rollout_page import Pieces

IN_TERMINAL, ON_PAGE = 4, 100  # groups
LETTERS = 1_200


def rollouts(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a file step_NNNNNN.jsonl of one.")],
    step: Annotated[
        str | None, typer.Option(metavar="N|N:M", help="Steps N:M, both ends included; also N, N: or :M.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="X|X:Y", help="Rewards X:Y, both ends included; also X, X: or :Y.")
    ] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Only this status, such as reward_error; may be given several times.")
    ] = None,
    task: Annotated[str, typer.Option(help="Only tasks whose id contains this.")] = "",
    text: Annotated[str, typer.Option(help="Only rollouts whose text contains this, in upper or lower case.")] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Largest number of groups shown. Default: {IN_TERMINAL}; {ON_PAGE} with --html.",
            show_default=False,
        ),
    ] = None,
    letters: Annotated[
        int, typer.Option(min=0, help="Largest number of characters of a completion in the terminal; 0: all.")
    ] = LETTERS,
    tokens: Annotated[
        bool | None,
        typer.Option(
            "--tokens/--no-tokens", help="Mark unlikely tokens. Default: with --html, if there is a tokenizer."
        ),
    ] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all selected rollouts, one JSON line each.")] = False,
    evaluations: Annotated[
        bool,
        typer.Option("--evaluations", help="Show the rollouts on held-out tasks, from evaluations during the run."),
    ] = False,
) -> None:
    """Show the rollouts of a run."""
    refuse_empty(run, "run", "a run folder, or a file step_NNNNNN.jsonl of one")
    wanted = Filter(
        steps=_span("--step", step, whole=True) or Interval(),
        rewards=_span("--reward", reward, whole=False),
        statuses=_statuses(status or []),
        task=task,
        text=text,
    )
    if as_json and html is not None:
        raise UserError("--json and --html exclude each other; give one of them")
    source = _evaluations_of(run) if evaluations else run
    if as_json:
        for of_step, place, row in matching_rows(source, wanted):
            typer.echo(json.dumps({"step": of_step, "group": place, **row.line}))
    elif html is not None:
        _write_page(run, source, wanted, limit or ON_PAGE, Path(html), tokens)
    else:
        pieces = _pieces(run) if tokens else None
        _show(source, wanted, limit or IN_TERMINAL, letters, pieces)


def _evaluations_of(run: str) -> str:
    """The folder of the run's evaluations. Raises UserError if it has none."""
    folder = Path(run) / EVALUATIONS
    if not folder.is_dir():
        raise UserError(
            f"--evaluations: '{run}' has no {EVALUATIONS}/; give a run with evaluation.every above 0, or"
            " `octetrl eval RUN --out FOLDER`, then `octetrl rollouts FOLDER`"
        )
    return str(folder)


def _show(source: str, wanted: Filter, limit: int, letters: int, pieces: Pieces | None) -> None:
    from rich.console import Console

    from octetrl.cli.rollouts_view import RolloutsView

    selection = select(source, wanted, limit)
    RolloutsView(Console(highlight=False), wanted, letters=letters, pieces=pieces).show(selection)


def _write_page(run: str, source: str, wanted: Filter, limit: int, path: Path, tokens: bool | None) -> None:
    from octetrl.telemetry.rollout_page import write_page

    refuse_file("--html", path, "rollouts.html")
    selection = select(source, wanted, limit)
    pieces, without = None, ""
    if tokens is not False:
        try:
            pieces = _pieces(run)
        except UserError as error:
            if tokens:
                raise
            without = f", tokens unmarked ({error})"
    with whole_file("--html", path) as file:
        write_page(file, Path(run).resolve().name, selection, wanted, pieces)
    typer.echo(f"wrote {path}: {len(selection.groups):,} of {selection.found:,} groups{without}")


def _pieces(run: str) -> Pieces:
    """Token pieces by the tokenizer of the run's last checkpoint or recipe. Raises UserError if there is none."""
    from octetrl.data.tokenizer import VOCABULARIES, load_tokenizer
    from octetrl.telemetry.token_pieces import token_pieces

    folder = Path(run)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"), reverse=True)
    candidates = [*checkpoints, *_tokenizers_of_recipe(folder / "config.yaml")]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in VOCABULARIES):
            tokenizer = load_tokenizer(candidate)
            return lambda token_ids: token_pieces(tokenizer, token_ids)
    raise UserError(f"--tokens: '{run}' has no checkpoint with a tokenizer, and its recipe names none that is here")


def _tokenizers_of_recipe(path: Path) -> list[Path]:
    from octetrl.config.load import load_recipe

    if not path.is_file():
        return []
    model = load_recipe(path).model
    return [Path(folder) for folder in (model.tokenizer, model.path) if folder is not None]


def _statuses(words: Sequence[str]) -> frozenset[RolloutStatus]:
    allowed = [status.value for status in RolloutStatus]
    for word in words:
        if word not in allowed:
            raise UserError(f"--status: '{word}' is none of {', '.join(allowed)}{nearest(word, allowed)}")
    return frozenset(RolloutStatus(word) for word in words)


def _span(option: str, text: str | None, *, whole: bool) -> Interval | None:
    """`3` is from 3 to 3, `3:` and `:3` are open."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    ends = (_number(low, whole), _number(high if colon else low, whole))
    if None in ends or text.strip(" :") == "" or not (low or high):
        kind = "whole numbers" if whole else "numbers"
        raise UserError(f"{option}: '{text}' is no range of {kind}; write 3, 3:10, 3: or :10")
    span = Interval(ends[0] if low else -math.inf, ends[1] if high or not colon else math.inf)  # type: ignore[arg-type]
    if span.low > span.high:
        raise UserError(f"{option}: '{text}' ends before it begins; write the smaller number first")
    return span


def _number(text: str, whole: bool) -> float | None:
    """The number; 0.0 for an empty text, None if it is not a number."""
    if not text:
        return 0.0
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and (not whole or number.is_integer()) else None
