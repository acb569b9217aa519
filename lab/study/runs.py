"""Trains the arms of a table of the study, several processes side by side, in calls of limited length.

    python -m lab.study.runs tiny-sums --seeds 8 --jobs 5 --seconds 560 [--arms bf16,fp8_full] [--model FOLDER]

A job is an arm with a seed (job.py). Jobs run seed by seed, so that a study cut short has the same seeds in all arms.
The cold start of a seed comes before its arms. The same command again goes on where the last one stopped: complete jobs
have their line, a job that was stopped resumes from its checkpoint (lab/jobs.py has the clock). To go on on another
machine, copy the folder `--state`, with the same path.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.jobs import Job, run_jobs
from lab.record import run_command
from lab.study.arms import ARMS, TABLES
from lab.study.job import START, arm_recipe, key, line_path, start_folder, start_recipe
from octetrl.system.errors import UserError


def chosen_arms(table: str, asked: str | None) -> tuple[str, ...]:
    if asked is None:
        return TABLES[table].arms
    arms = tuple(ARMS) if asked == "all" else tuple(asked.split(","))
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"--arms: '{arm}' is no arm of the study; give all, or some of {', '.join(ARMS)}")
    return arms


def jobs_of(arguments: argparse.Namespace, arms: Sequence[str]) -> list[Job]:
    """Seed by seed: the start, then the arms."""
    state, table = arguments.state, arguments.table
    has_start = TABLES[table].start is not None
    model = () if arguments.model is None else ("--model", arguments.model)
    jobs = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        words = ("lab.study.job", str(state), table)
        start = Job(
            key(table, START, seed),
            (*words, START, str(seed), *arguments.start_change),
            partial(Path.is_dir, start_folder(state, table, seed)),
        )
        jobs += [start] if has_start else []
        for arm in arms:
            done = partial(Path.exists, line_path(state, table, arm, seed))
            own = (*words, arm, str(seed), *model, *arguments.change)
            jobs.append(Job(key(table, arm, seed), own, done, start if has_start else None))
    return jobs


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--arms", help="default: the table's; or all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side on each GPU, or on the CPU")
    parser.add_argument("--seconds", type=float, default=560.0, help="after this time nothing runs any more")
    parser.add_argument("--model", help="folder of the pretrained model, for a table that has one")
    parser.add_argument("--state", type=Path, default=Path("runs/study"))
    parser.add_argument("--start-change", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--change", action="append", default=[], metavar="section.key=value", help="of all arms")
    arguments = parser.parse_args(words)
    arms = chosen_arms(arguments.table, arguments.arms)
    for arm in arms:  # a wrong recipe is refused before the first job begins
        arm_recipe(arguments.state, arguments.table, arm, 0, arguments.model, arguments.change)
    if TABLES[arguments.table].start is not None:
        start_recipe(arguments.state, arguments.table, 0, arguments.start_change)
    jobs = jobs_of(arguments, arms)
    failures = run_jobs(jobs, arguments.state / "logs", at_once=arguments.jobs, seconds=arguments.seconds)
    left = [job.name for job in jobs if not job.is_complete()]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs complete; left: {', '.join(left[:6]) or 'none'}")
    if failures:
        raise UserError(f"{len(failures)} jobs failed; {failures[0]}")


if __name__ == "__main__":
    run_command("study.runs", main)
