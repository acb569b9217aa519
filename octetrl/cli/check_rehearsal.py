"""The last part of `octetrl check`: tokenizer, tasks and score are tried, and what is wrong ends the command."""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.cli.check_files import content_problems
from octetrl.cli.check_lines import print_lines
from octetrl.config.schema import Recipe
from octetrl.run.rehearsal import rehearse
from octetrl.run.tokenizer_process import TokenizerProcess
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


def rehearsal_problems(recipe: Recipe, spec: ModelSpec | None, tokenizer: TokenizerProcess | None) -> list[str]:
    """Load tokenizer, tasks and modules, call the score, and show what it gives. Returns what is wrong."""
    problems = list(content_problems(recipe, spec, tokenizer))
    rehearsal = rehearse(recipe, tokenizer)
    problems += rehearsal.problems
    try:
        if tokenizer is not None:
            tokenizer.wait()
    except UserError as error:
        problems.append(str(error))
    print_lines("rehearsal", iter(rehearsal.lines))
    return problems


def refuse_problems(recipe: str, problems: Sequence[str]) -> None:
    """Raise UserError if there are any. recipe: its name."""
    if len(problems) == 1:
        raise UserError(f"{recipe}: {problems[0]}")
    if problems:
        raise UserError("\n  ".join([f"{recipe}: {len(problems)} problems", *problems]))
