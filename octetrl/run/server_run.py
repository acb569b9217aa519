"""An evaluation of a server's model: `octetrl eval` with `engine.backend: openai`. No weights are loaded.

With `answers: tokens` the recipe's model gives the tokenizer, the chat template and the vocabulary, which must be those
of the server's model. With `answers: text` the server has all of these, and the recipe's model is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from octetrl.algorithms.table import build_algorithm
from octetrl.backends.openai.backend import NO_LIMIT, OpenaiBackend
from octetrl.backends.openai.session import OpenaiSession
from octetrl.backends.openai.text import CharacterTokenizer
from octetrl.config.in_words import without_effect
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from octetrl.records import Completion, GenerationRequest, OnCompletions
from octetrl.rollout.backend import OnSession, SessionRecord, not_asked
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.run.build import build_collection
from octetrl.run.device import seed_everything
from octetrl.run.environment import build_environments, build_tasks
from octetrl.run.environment_parts import Rewards, build_chats, build_scorers
from octetrl.run.evaluate import evaluate
from octetrl.run.recipe_model import with_found_model
from octetrl.run.state import Run
from octetrl.run.step import GenerateThenLearn
from octetrl.telemetry.console import Console
from octetrl.telemetry.eval_report import EvalReport
from octetrl.workers.clock import Clock
from octetrl.workers.model_shape import model_spec
from octetrl.workers.training_progress import most_tokens, rollout_shown
from octetrl.workers.workers import Workers


class ServerWorkers:
    """Generates with a server, and shows its progress."""

    needs_calibration = False

    def __init__(self, backend: OpenaiBackend, console: Console) -> None:
        self.backend = backend
        self._console, self._clock = console, Clock()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request. One without an answer has `finish_reason` FAILED."""
        with rollout_shown(self._console, most_tokens(requests)) as on_progress, self._clock("rollout") as took:
            drawn = self.backend.generate(requests, on_progress, on_completions)
        on_end(SessionRecord(took, self.backend.metrics))
        return drawn

    @contextmanager
    def session(self, on_end: OnSession = not_asked) -> Iterator[OpenaiSession]:
        shown = rollout_shown(self._console)
        with shown as on_progress, self._clock("rollout") as took, self.backend.session(on_progress) as session:
            yield session
        on_end(SessionRecord(took, self.backend.metrics))

    def forget_prefixes(self) -> None:
        """Nothing: a server decides on its own what it caches."""

    def close(self) -> None:
        self.backend.close()


def evaluate_server(recipe: Recipe, *, all_tasks: bool) -> EvalReport:
    """Evaluates the model of `engine.openai` by the recipe's environment. all_tasks: not only those held out."""
    run = build_server_run(recipe)
    try:
        return evaluate(run, run.taskset.all_tasks() if all_tasks else None)
    finally:
        run.close()


def build_server_run(recipe: Recipe) -> Run:
    """What an evaluation needs, with a server instead of workers. Raises UserError for what the user can correct,
    and if the server is not there."""
    server = recipe.engine.openai
    assert server is not None, "validated: engine.backend openai has its section"
    seed_everything(recipe.seed)
    if server.answers == "tokens":
        recipe = with_found_model(recipe, weights=False)
        spec = model_spec(recipe)
        tokenizer = load_tokenizer(tokenizer_folder(recipe), spec.vocab_size)
    else:
        spec, tokenizer = None, cast(Tokenizer, CharacterTokenizer())
    console = Console(recipe.logging.console, recipe.steps, mismatch_limit=recipe.mismatch.warn_above)
    environments = build_environments(recipe)
    chat = build_chats(recipe, spec, tokenizer, environments)
    collection = build_collection(recipe, chat)
    if spec is None:
        collection = replace(collection, max_prompt_tokens=NO_LIMIT, context_length=NO_LIMIT)
    taskset = build_tasks(recipe, environments)
    with console.phase("load"):
        backend = (
            OpenaiBackend.of_text(server)
            if spec is None
            else OpenaiBackend.of_tokens(
                server, spec=spec, tokenizer=tokenizer, context_length=recipe.model.context_length
            )
        )
    workers = ServerWorkers(backend, console)
    unread = without_effect(recipe)
    if unread is not None:
        console.warn(unread)
    try:
        rewards = build_scorers(recipe, environments, tokenizer)
    except BaseException:
        workers.close()
        raise
    return Run(
        config=recipe,
        tokenizer=tokenizer,
        taskset=taskset,
        conversations=None,
        rewards=cast(Rewards, rewards),  # validated: no reward model scores, so there are some
        algorithm=build_algorithm(recipe.algorithm),
        workers=cast(Workers, workers),  # it generates, which is all that an evaluation asks
        method=GenerateThenLearn(),
        console=console,
        collection=collection,
        lengths=ExpectedLengths(),
    )
