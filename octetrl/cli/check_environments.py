"""The part of `octetrl check` for environments: what each is, its share of the tasks, and its sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.cli.check_turns import turns_line
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, never_drawn
from octetrl.system.errors import UserError


def environment_lines(recipe: Recipe, *, imports: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each environment. imports: whether modules of the user may be imported for it."""
    total = sum(one.weight for one in recipe.environments.values())
    for name, one in alone(recipe).items():
        config = one.environment
        if config.dataset is not None:
            share = f"{recipe.environments[name].weight / total:.1%} of the tasks, " if name else ""
            label = f"environment {name}" if name else "environment"
            yield label, f"{config.kind} {config.dataset}, {share}{config.eval_size} tasks held out"
            yield from turns_line(one) if imports else ()
        if config.kind == "code" or "python" in config.tools:
            yield from _sandbox(config.sandbox)
    for line in never_drawn(recipe):
        yield "warning", line


def _sandbox(config: SandboxConfig) -> Iterator[tuple[str, str]]:
    """The level in force, and what it does not protect from. Where there is none, the checks of files say so."""
    from octetrl.environments.code.scorer import packages_line
    from octetrl.process.sandbox import sandbox_for

    try:
        sandbox = sandbox_for(config)
    except UserError:
        return
    yield "sandbox", f"level {sandbox.level}, {sandbox.interpreter.executable}; not protected from:"
    for gap in sandbox.protection.gaps:
        yield "", gap
    if line := packages_line(config):
        yield "warning", line
