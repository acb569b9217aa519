"""Reads the lines of the study's jobs, from a state's folder or a result, and refuses what cannot be compared.

    (path, line) in lines_in(state, table)        each line of the table, with the identity that its file's name says
    refuse_other_settings(...)                    runs: a line, start or run has other changes, steps or another model
    refuse_mixed(...)                             table: lines differ from each other in these
    known_arms(...)                               the lines of arms that the study has; says which it leaves out

A line names the code that trained it: `commit`, and `dirty` (true if the files differed from that commit). Lines of
older results have neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab import record
from lab.study.arms import ARMS
from lab.study.job import key, read_made_with, read_seconds_of
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json, read_json, read_text, shown
from octetrl.telemetry.report_data import is_number

Row = dict[str, Any]
MEASURES = ("start/accuracy", "end/accuracy", "end/accuracy_bf16")
AVERAGED = ("mismatch/gen_kl", "fp8/kv_saturation", "seconds")
SETTINGS = ("table", "changes", "of_steps", "start_changes", "model")
DAMAGED = "restore the file, or delete it to train its run again"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _is_point(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_number(value[0]) and _is_share(value[1])


def _is_curve(value: object) -> bool:
    if not isinstance(value, list) or not all(map(_is_point, value)):
        return False
    return all(step < after for (step, _), (after, _) in pairwise(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_commit(value: object) -> bool:
    return isinstance(value, str) and value.removesuffix("-dirty").strip() != ""


Rule = tuple[Callable[[object], bool], str]
NUMBER: Rule = (is_number, "a finite number")
ACCURACY: Rule = (_is_share, "a number from 0 to 1")
COMMIT: Rule = (_is_commit, "the name of a commit")
IDENTITY: Mapping[str, Rule] = {
    "table": (_is_text, "a text"),
    "arm": (_is_text, "a text"),
    "seed": (_is_whole, "a whole number"),
    "status": (lambda value: value in ("complete", "failed"), "'complete' or 'failed'"),
}
FURTHER: Mapping[str, Rule] = {  # what a line may lack
    "of_steps": (_is_whole, "a whole number"),
    **dict.fromkeys(("changes", "start_changes"), (lambda value: _is_list_of(value, _is_text), "a list of texts")),
    "model": (_is_text, "a text"),
    "commit": COMMIT,
    "dirty": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(AVERAGED, NUMBER),
    **dict.fromkeys((*MEASURES, "start/accuracy_bf16"), ACCURACY),
}
CURVE: Rule = (_is_curve, "a list of rising steps, each with an accuracy from 0 to 1,")
FROM = ("commit", "source_digest", "date", "machine")


def refuse_line(line: object, where: str, remedy: str = DAMAGED) -> Row:
    """Return the line. UserError: it is not the line of a job, or one of its figures is not a number."""
    if not isinstance(line, dict):
        raise UserError(f"{where}: not an object with the fields of a job's line; {remedy}")
    rules = dict(IDENTITY) | {name: rule for name, rule in FURTHER.items() if line.get(name) is not None}
    for name, (is_right, needed) in rules.items():
        if not is_right(line.get(name)):
            raise UserError(f"{where}: '{name}' is {shown(line.get(name))}, {needed} is needed; {remedy}")
    return line


def refuse_figures(line: Row, where: str, remedy: str = DAMAGED) -> None:
    """UserError: a complete line has no curve that can be drawn."""
    is_right, needed = CURVE
    if line["status"] == "complete" and not is_right(line.get("curve")):
        raise UserError(f"{where}: 'curve' is {shown(line.get('curve'))}, {needed} is needed; {remedy}")


def lines_in(folder: Path, table: str, option: str) -> list[tuple[Path, Row]]:
    """The lines of a table in `folder`/lines, by file. UserError: a file is no line or is named as another one."""
    found: dict[str, tuple[Path, Row]] = {}
    for path in sorted((folder / "lines").glob(f"{table}-*.json")):
        where = f"{option}: 'lines/{path.name}'"
        line = refuse_line(parse_json(_text(path, where), where, DAMAGED), where)
        name = key(line["table"], line["arm"], line["seed"])
        if name in found:
            both = f"'lines/{found[name][0].name}' and 'lines/{path.name}'"
            raise UserError(f"{option}: {both} are both of {_named(line)}; delete one of them")
        found[name] = path, line
    for name, (path, _) in found.items():
        if path.stem != name:
            raise UserError(f"{option}: 'lines/{path.name}' is the line of '{name}'; {DAMAGED}")
    return list(found.values())


def _text(path: Path, where: str) -> str:
    try:
        return read_text(path, DAMAGED)
    except UserError as error:  # names a path, which may be that of unpacked files
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from None


def refuse_other_settings(folder: Path, option: str, table: str, settings: Mapping[str, Any]) -> None:
    """UserError: the folder has a line, a start or an unfinished run of the table with other settings than those of
    this command. What does not say a setting is accepted."""
    held = [(f"lines/{path.name}", line) for path, line in lines_in(folder, table, option)]
    for path in sorted([*(folder / "starts").glob(f"{table}-*"), *(folder / "runs").glob(f"{table}-*")]):
        try:
            held.append((str(path.relative_to(folder)), read_made_with(path)))
            read_seconds_of(path)
        except UserError as error:  # names a path, which may be that of unpacked files
            raise UserError(f"{option}: {str(error).removeprefix(f'{folder}/')}") from None
    for where, known in held:
        for name in SETTINGS:
            given = settings.get(name, known.get(name))
            if known.get(name) is not None and _setting(name, known[name]) != _setting(name, given):
                raise UserError(
                    f"{option}: '{where}' was trained with {_said(name, known[name])}, this command gives"
                    f" {_said(name, given)}; give the same, or another --state"
                )


def refuse_mixed(lines: Sequence[Row], option: str) -> None:
    """UserError: the lines are not of one table, one number of steps and the same changes, or one is there twice."""
    for name in SETTINGS:
        known = [line for line in lines if line.get(name) is not None]
        for one, other in pairwise(known):
            if _setting(name, one[name]) != _setting(name, other[name]):
                raise UserError(
                    f"{option}: {_named(one)} was trained with {_said(name, one[name])}, {_named(other)} with"
                    f" {_said(name, other[name])}; compare them apart, each with its own --state and --name"
                )
    seen: set[tuple[str, int]] = set()
    for line in lines:
        if (line["arm"], line["seed"]) in seen:
            raise UserError(f"{option}: two lines are of {_named(line)}; delete one of them")
        seen.add((line["arm"], line["seed"]))


def _named(line: Row) -> str:
    return f"{line['arm']}, seed {line['seed']}"


def _setting(name: str, value: Any) -> object:
    """Changes of different fields are the same in any order."""
    if name not in ("changes", "start_changes"):
        return value
    parts = [change.partition("=") for change in value]
    return {field.strip(): given.strip() for field, _, given in parts}


def _said(name: str, value: Any) -> str:
    if name == "changes":
        return f"the changes {' '.join(value)}" if value else "no changes"
    if name == "start_changes":
        return f"the changes {' '.join(value)} of the start" if value else "no changes of the start"
    if name == "model":
        return f"the model {value}"
    return f"{value} steps" if name == "of_steps" else f"table '{value}'"


def known_arms(lines: Sequence[Row], option: str) -> list[Row]:
    """The lines of arms that the study has. Says on standard error which lines it leaves out."""
    unknown = sorted({line["arm"] for line in lines} - ARMS.keys())
    if unknown:
        count = sum(line["arm"] in unknown for line in lines)
        what = f"{count} line{'s' if count > 1 else ''} of {', '.join(map(shown, unknown))}"
        print(f"lab.study.table: {option}: left out {what}, no arm of the study", file=sys.stderr)
    return [line for line in lines if line["arm"] in ARMS]


def read_result(path: Path, option: str) -> Row:
    """The result of an earlier table, with its lines checked. UserError: it is none."""
    remedy = "give a result that lab.study.table wrote"
    try:
        found = dict(read_json(path, remedy))
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    where = f"{option}: '{path}'"
    for name in (*FROM, "bench"):
        if not _is_text(found.get(name)):
            raise UserError(f"{where}: '{name}' is {shown(found.get(name))}, a text is needed; {remedy}")
    if not _is_commit(found["commit"]):
        raise UserError(f"{where}: 'commit' is {shown(found['commit'])}, {COMMIT[1]} is needed; {remedy}")
    if not isinstance(found.get("lines"), list) or not found["lines"]:
        raise UserError(f"{where} has no lines of jobs; {remedy}")
    for number, line in enumerate(found["lines"], 1):
        at = f"{where}, line {number} of its 'lines'"
        refuse_figures(refuse_line(line, at, remedy), at, remedy)
    return found


def with_commit(line: Row, where: str) -> Row:
    """The line with its own `commit` and `dirty`, if it says where it was measured. UserError: it says it wrongly."""
    head = line.get("from")
    if not isinstance(head, dict) or not all(_is_text(head.get(name)) for name in FROM):
        raise UserError(f"{where}: 'from' does not say where the run was measured; {DAMAGED}")
    if not _is_commit(head["commit"]):
        raise UserError(f"{where}: 'from.commit' is {shown(head['commit'])}, {COMMIT[1]} is needed; {DAMAGED}")
    scripts = head.get("benchmarks_digest")
    if not (scripts is None or _is_text(scripts)):
        raise UserError(f"{where}: 'from.benchmarks_digest' is {shown(scripts)}, a text is needed; {DAMAGED}")
    if head["commit"] == "unknown":
        return line
    is_dirty = _is_dirty(head["commit"], head["source_digest"], scripts)
    return line | {"commit": head["commit"].removesuffix("-dirty"), "dirty": is_dirty}


@cache
def _is_dirty(commit: str, package: str, scripts: str | None) -> bool:
    digests = {"source_digest": package} | ({} if scripts is None else {"benchmarks_digest": scripts})
    return record.is_dirty({"commit": commit, **digests})


def are_of_several_trees(lines: Sequence[Row]) -> bool | None:
    """Whether the lines are of several commits, or of files that no commit has. None: a line does not say it."""
    if not all("commit" in line and "dirty" in line for line in lines):
        return None
    shortest = min((line["commit"] for line in lines), key=len)  # one commit may be written with fewer digits
    return any(line["dirty"] or not line["commit"].startswith(shortest) for line in lines)
