"""Compares the arms of a study: a table, a result file, curves, and the table of lab/study/README.md.

    python -m lab.study.table tiny-sums [--state runs/study] [--document lab/study/README.md]

Reads the lines of complete jobs (runs.py). Writes `lab/results/study_TABLE.json` with a row an arm and every line,
`docs/pictures/study_TABLE.svg` with a panel an arm, and the table between `<!-- study: TABLE -->` and
`<!-- study: end -->` of the document, if it has these. `--render` reads the result file instead of the lines. `--name`
names the result of lines that do not belong beside those of the table, and `--arms` takes the lines of these arms
alone. `--join RESULT` adds the lines of a result, if every seed that both have shows equal starts: an arm of it has the
same rewards and accuracies in both, or a pretrained model has the same accuracy before training.

Accuracies are means over seeds with their standard errors, of complete runs; failed ones are counted. A difference is
that to `bf16`, seed by seed (pairs.py). `start` is the model before training in the arm's own formats. An arm with †
has runs of several commits, or of files that no commit has. Lines with different changes, steps or models are refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.curves import Curve, panels
from lab.record import RESULTS, is_dirty, refuse_name, run_command, show, write_result
from lab.study.arms import ARMS, TABLES
from lab.study.pairs import Difference, mean_of, paired
from octetrl.system.errors import UserError

Row = dict[str, Any]
MEASURES = ("start/accuracy", "end/accuracy", "end/accuracy_bf16")
AVERAGED = ("mismatch/gen_kl", "fp8/kv_saturation", "seconds")
SETTINGS = ("table", "changes", "of_steps", "start_changes", "model")
DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "bf16"
REPEATED = ("start/accuracy_bf16", "rewards", "curve", "end/accuracy")  # equal in two runs from one start
SHOWN = (
    ("seeds", "seeds"),
    ("start", "start/accuracy"),
    ("end", "end/accuracy"),
    ("s.e.", "end/error"),
    ("end, weights in BF16", "end/accuracy_bf16"),
    ("end − bf16", "difference"),
    ("95% interval, from", "difference/low"),
    ("to", "difference/high"),
)


def read_lines(state: Path, table: str, arms: str | None = None) -> list[Row]:
    """The lines of a table, in the order of arms and seeds; `arms`: of these alone. UserError: there are none."""
    wanted = ARMS if arms is None else arms.split(",")
    lines = [with_commit(json.loads(path.read_text())) for path in (state / "lines").glob(f"{table}-*.json")]
    found = [line for line in lines if line["table"] == table and line["arm"] in wanted]
    if not found:
        raise UserError(f"--state: '{state}' holds no line of '{table}' and these arms; run `lab.study.runs {table}`")
    return ordered(found)


def ordered(lines: Sequence[Row]) -> list[Row]:
    """The lines by arm and seed. UserError: they are not of one table, one number of steps, the same changes and
    model, or one is there twice."""
    for name in SETTINGS:
        known = [line for line in lines if line.get(name) is not None]
        for one, other in pairwise(known):
            if _setting(one[name]) != _setting(other[name]):
                raise UserError(
                    f"{name} is {one[name]} in {one['arm']}, seed {one['seed']}, and {other[name]} in {other['arm']},"
                    f" seed {other['seed']}; compare them apart, each with its own --state and --name"
                )
    order = list(ARMS)
    found = sorted(
        (line for line in lines if line["arm"] in ARMS), key=lambda line: (order.index(line["arm"]), line["seed"])
    )
    for one, other in pairwise(found):
        if (one["arm"], one["seed"]) == (other["arm"], other["seed"]):
            raise UserError(f"two lines are of {one['arm']}, seed {one['seed']}; delete one of them")
    return found


def _setting(value: Any) -> object:
    """Changes of different fields are the same in any order."""
    return sorted(value) if isinstance(value, list) else value


def with_commit(line: Row) -> Row:
    """The line with its own `commit` and `dirty`."""
    head = line["from"]
    names = ("commit", "source_digest", "benchmarks_digest")
    dirty = is_dirty({name: head[name] for name in names if name in head})
    return line | {"commit": head["commit"].removesuffix("-dirty"), "dirty": dirty}


def are_of_several_trees(lines: Sequence[Row]) -> bool | None:
    """Whether the lines are of several commits, or of files that no commit has. None: a line does not say it."""
    if not all("commit" in line and "dirty" in line for line in lines):
        return None
    shortest = min((line["commit"] for line in lines), key=len)  # one commit may be written with fewer digits
    return any(line["dirty"] or not line["commit"].startswith(shortest) for line in lines)


def joined(lines: Sequence[Row], result: Path) -> list[Row]:
    """The result's lines and those of `lines` that it lacks. UserError: in a seed that both have, nothing shows that
    the starts are equal."""
    record = json.loads(result.read_text())
    head = {name: value for name, value in record.items() if name not in ("rows", "lines")}
    earlier: list[Row] = [{"from": head} | line for line in record["lines"] if line["arm"] in ARMS]
    for seed in sorted({line["seed"] for line in earlier} & {line["seed"] for line in lines}):
        held, new = ({line["arm"]: line for line in own if line["seed"] == seed} for own in (earlier, lines))
        repeated = held.keys() & new.keys()
        equal = all(held[arm].get(name) == new[arm].get(name) for arm in repeated for name in REPEATED)
        starts = {line.get("start/accuracy_bf16") for line in (*held.values(), *new.values())}
        pretrained = TABLES[lines[0]["table"]].start is None and len(starts) == 1 and None not in starts
        if not equal or not (repeated or pretrained):
            raise UserError(f"--join: '{result}' may have other starts in seed {seed}; keep the results apart")
    both = {(line["arm"], line["seed"]): line for line in (*lines, *earlier)}
    return ordered(list(both.values()))


def rows_of(lines: Sequence[Row]) -> list[Row]:
    """A row for each arm that has a line."""
    complete = [line for line in lines if line["status"] == "complete"]

    def values(arm: str, measure: str) -> dict[int, float]:
        own = [line for line in complete if line["arm"] == arm]
        return {line["seed"]: line[measure] for line in own if line.get(measure) is not None}

    rows = []
    for arm in dict.fromkeys(line["arm"] for line in lines):
        own = [line for line in lines if line["arm"] == arm]
        row: Row = {"precision": arm, "workload": own[0]["table"], "arm": arm, "means": ARMS[arm].means}
        row |= {"seeds": sum(line["status"] == "complete" for line in own)}
        row |= {"failed": len(own) - row["seeds"]}
        of_several = are_of_several_trees(own)
        row |= {} if of_several is None else {"dirty": of_several}
        for measure in MEASURES:
            found = values(arm, measure)
            if found:
                mean = mean_of(list(found.values()))
                row[measure] = mean.mean
                if mean.count > 1:
                    row[f"{measure.split('/')[0]}/{_error_name(measure)}"] = mean.error
        for name in AVERAGED:
            if values(arm, name):
                row[name] = statistics.fmean(values(arm, name).values())
        if arm != REFERENCE:
            for measure, name in (("end/accuracy", "difference"), ("end/accuracy_bf16", "difference_bf16")):
                row |= _fields(name, paired(values(arm, measure), values(REFERENCE, measure)))
            own_ends, ends = values(arm, "end/accuracy"), values(REFERENCE, "end/accuracy")
            both = sorted(own_ends.keys() & ends.keys())
            row |= {f"difference/seed_{one}": own_ends[one] - ends[one] for one in both}
            row |= _fields(
                "start_difference", paired(values(arm, "start/accuracy"), values(REFERENCE, "start/accuracy"))
            )
        rows.append(row)
    return rows


def _error_name(measure: str) -> str:
    return "error_bf16" if measure.endswith("_bf16") else "error"


def _fields(name: str, difference: Difference | None) -> Row:
    if difference is None:
        return {}
    found: Row = {name: difference.mean, f"{name}/error": difference.error, f"{name}/seeds": difference.count}
    if difference.low is not None:
        found |= {f"{name}/low": difference.low, f"{name}/high": difference.high}
    return found


def where_measured(lines: Sequence[Row]) -> Row:
    """The head of the result: where the jobs ran, not this process. Jobs of different trees are marked dirty."""
    heads = [line["from"] for line in lines]
    trees = {(head["commit"], head["source_digest"], head.get("benchmarks_digest")) for head in heads}
    commits = {commit for tree, _, _ in trees for commit in tree.removesuffix("-dirty").split(", ")}
    found = dict(heads[-1])
    found["date"] = max(head["date"] for head in heads)
    found["machine"] = ", ".join(sorted({head["machine"] for head in heads}))
    if len(trees) > 1:
        found["commit"] = ", ".join(sorted(commits)) + "-dirty"
    return found


def save(name: str, lines: Sequence[Row], folder: Path) -> Path:
    kept = [{field: value for field, value in line.items() if field != "from"} for line in lines]
    path = write_result("study", name, rows_of(kept), folder, lines=kept)
    where = {field: value for field, value in where_measured(lines).items() if field not in ("bench", "command")}
    record = json.loads(path.read_text()) | where
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def picture(lines: Sequence[Row]) -> str | None:
    """A panel an arm: held-out accuracy over steps, a thin line a seed. Only complete runs have a line. None: no run
    has two evaluations, which a line needs."""
    curves: dict[str, list[Curve]] = {}
    for line in lines:
        if line["status"] == "complete" and line["curve"]:
            begin = [(0, line["start/accuracy"])] if line.get("start/accuracy") is not None else []
            points = [*begin, *((step, value) for step, value in line["curve"])]
            if len(points) > 1:
                curves.setdefault(line["arm"], []).append(points)
    whole = {arm: [one for one in own if len(one) == len(own[0])] for arm, own in curves.items()}
    return panels(whole, x="step", y="held-out accuracy")


def document_table(name: str, record: Row) -> str:
    """The table for lab/study/README.md, with the marker that the tests of figures check."""
    failed = [("failed", "failed")] if any(row["failed"] for row in record["rows"]) else []
    shown = (SHOWN[0], *failed, *SHOWN[1:])
    fields = " | ".join(["-", *(field for _, field in shown)])
    lines = [
        f"<!-- figures: lab/results/study_{name}.json | {fields} -->",
        "| arm | " + " | ".join(title for title, _ in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    whole = is_dirty(record)
    for row in record["rows"]:
        dagger = " †" if row.get("dirty", whole) else ""
        cells = [_cell(field, row) for _, field in shown]
        lines.append(f"| `{row['arm']}`{dagger} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(field: str, row: Row) -> str:
    if row.get(field) is None:
        return ""
    if field in ("seeds", "failed"):
        return f"{row[field]}"
    return f"{row[field]:+.3f}" if field.startswith("difference") else f"{row[field]:.3f}"


def put_table(text: str, name: str, table: str) -> str:
    """The document with the table between its markers. UserError: the markers are missing."""
    begin, end = f"<!-- study: {name} -->\n", "<!-- study: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise UserError(f"--document: it has no lines '{begin.strip()}' and '{end}'; add them where the table belongs")
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--name", help="of the result; default: the table's")
    parser.add_argument("--arms", help="only lines of these; default: all")
    parser.add_argument("--join", type=Path, help="a result file with lines of the same starts")
    parser.add_argument("--state", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=DOCS / "pictures")
    parser.add_argument("--document", type=Path, help="put the table into it")
    parser.add_argument(
        "--render", action="store_true", help="from the runs in the result file, whose rows are renewed"
    )
    arguments = parser.parse_args(words)
    name = arguments.table if arguments.name is None else arguments.name
    refuse_name(name)
    path, drawing = arguments.out / f"study_{name}.json", arguments.pictures / f"study_{name}.svg"
    if arguments.render:
        record = json.loads(path.read_text())
        lines = ordered(record["lines"])
    else:
        lines = read_lines(arguments.state, arguments.table, arguments.arms)
        lines = lines if arguments.join is None else joined(lines, arguments.join)
    if arguments.render:
        record["rows"] = rows_of(lines)
        path.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(f"wrote {save(name, lines, arguments.out)}")
        record = json.loads(path.read_text())
    show(
        record["rows"],
        f"{name}: held-out accuracy, means over seeds",
        ("arm", *(field for _, field in SHOWN), "failed"),
    )
    drawn = picture(lines)
    if drawn is not None:
        drawing.write_text(drawn)
    if arguments.document is not None:
        text = put_table(arguments.document.read_text(), name, document_table(name, record))
        arguments.document.write_text(text)


if __name__ == "__main__":
    run_command("study.table", main)
