"""`octetrl check --eval`: an evaluation by a server (`engine.backend: openai`). Nothing is asked of the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import typer

from octetrl.cli.check_environments import environment_lines
from octetrl.cli.check_files import file_problems, start_tokenizer
from octetrl.cli.check_lines import print_lines
from octetrl.cli.check_rehearsal import refuse_problems, rehearsal_problems
from octetrl.config.load import load_recipe
from octetrl.config.openai import OpenaiConfig
from octetrl.config.schema import Recipe
from octetrl.config.validate_backend import without_effect
from octetrl.endpoint import lacking
from octetrl.environments.python_object import search_beside
from octetrl.models.families import load_spec
from octetrl.run.recipe_model import with_found_model
from octetrl.system.errors import UserError


def check_server(path: str, overrides: Sequence[str], *, only: bool) -> None:
    """Show what an evaluation of the recipe asks of its server and what is promised. Raises UserError for problems.

    only: no other option was given."""
    recipe = load_recipe(path, overrides, training=False)
    server = recipe.engine.openai
    if recipe.engine.backend != "openai" or server is None or not only:
        raise UserError(
            "--eval: it checks an evaluation by a server; give engine.backend=openai with its engine.openai.base_url"
            " and engine.openai.model, without --sample and --memory-gib; leave --eval out for any other recipe"
        )
    search_beside(path)
    problems = list(lacking(server, "engine.openai"))
    spec, named = None, recipe
    if server.answers == "tokens":
        try:
            named = with_found_model(recipe, weights=False)
            spec = load_spec(str(named.model.path)) if named.model.preset is None else None
        except UserError as error:
            problems.append(str(error))
    tokenizer, wrong_files = start_tokenizer(named, spec) if server.answers == "tokens" else (None, None)
    with tokenizer or nullcontext():
        problems += [] if wrong_files is None else [wrong_files]
        problems += file_problems(_without_weights(recipe), None)
        print_lines("evaluation", server_lines(recipe, server, imports=not problems))
        refuse_problems(path, problems)
        problems = rehearsal_problems(_without_weights(recipe), None, tokenizer)
    refuse_problems(path, list(dict.fromkeys(problems)))
    typer.echo("no problems")


def _without_weights(recipe: Recipe) -> Recipe:
    """The recipe of which no weights are looked for."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"init": "random", "lora": None})})


def server_lines(recipe: Recipe, server: OpenaiConfig, *, imports: bool) -> Iterator[tuple[str, str]]:
    """What is asked of the server, and what holds for its answers. imports: also what the environment's code says."""
    yield "rollout backend", f"{server.name}, up to {server.concurrency} requests in flight"
    unread = without_effect(recipe)
    if unread is not None:
        yield "warning", unread
    yield "weights", "the server's own; none are loaded here and none are published"
    if server.answers == "tokens":
        folder = recipe.model.tokenizer or recipe.model.path
        yield "answers", f"token ids and log-probs; tokenizer and chat template of {folder}"
        yield "log-probs", "of the sampled tokens, as the server computes them"
    else:
        yield "answers", "text; the server applies its own chat template, and counts its tokens"
        yield "log-probs", "none, and no token ids: environments with several turns are refused"
    yield "parity", "measured: no weights are compared, and no log-probs with a trainer's"
    yield "training", "refused with this backend"
    evaluation = recipe.evaluation
    yield "sampling", f"{evaluation.samples} a task, temperature {evaluation.temperature:g}"
    key = server.api_key_variable
    yield "key", "none is sent" if key is None else f"of the environment variable {key}"
    wait = f"{server.timeout_seconds:g} s for each answer, {server.retries} retries from {server.backoff_seconds:g} s"
    yield "limits", wait
    yield from environment_lines(recipe, imports=imports)
