"""Answers that are scored but not learnt from: evaluations on held-out tasks, and a sample of a recipe's tasks.

An evaluation's result is an `EvalReport` (telemetry/eval_report.py). Completions are sampled with the same seeds every
time. So only the policy changes from one evaluation to the next, and compared models use the same random numbers.

During a run it does not affect training. Requests have their own seeds, the order of tasks does not advance, and the
engine forgets the prompts. The global random generators, which a user's environment may use, are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from octetrl.algorithms.table import build_algorithm
from octetrl.backends.openai.backend import NO_LIMIT, OpenaiBackend
from octetrl.backends.openai.session import OpenaiSession
from octetrl.backends.openai.text import CharacterTokenizer
from octetrl.config.environment import EvalSetConfig
from octetrl.config.in_words import without_effect
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer, recipe_tokenizer
from octetrl.environments.python_object import Given
from octetrl.records import Completion, GenerationRequest, OnCompletions, RolloutGroup, Task
from octetrl.rollout.backend import OnSession, SessionRecord, not_asked
from octetrl.rollout.collect import Collecting, ExpectedLengths, collect_groups
from octetrl.run.build import build_collection, build_run
from octetrl.run.device import generators_put_back, seed_everything
from octetrl.run.environment import NOTHING_GIVEN, Rewards, build_chats, build_environments, build_rewards, build_tasks
from octetrl.run.recipe_files import with_found_model
from octetrl.run.state import Run
from octetrl.run.step import GenerateThenLearn
from octetrl.run.trained_model import checkpoint_step, read_model, refuse_pruned, trained_model, weights_folder
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.telemetry.eval_report import EvalReport, Scoring
from octetrl.trainer.packing import pack
from octetrl.trainer.without_update import Sums, added
from octetrl.workers.clock import Clock
from octetrl.workers.model_shape import model_spec
from octetrl.workers.team import most_tokens, rollout_shown
from octetrl.workers.workers import Workers


def evaluate(run: Run, *, all_tasks: bool = False) -> EvalReport:
    """Evaluates the held-out tasks with the published weights. all_tasks: not only these."""
    with generators_put_back():  # a user's task may draw when its prompt is read
        sets = run.taskset.evaluation_sets(all_tasks=all_tasks)
    if not any(sets.values()):
        raise UserError("environment.eval_size is 0, so no task is held out to evaluate on; set it above 0")
    state = Collecting()
    with run.console.phase("evaluate"), generators_put_back():
        reports = {name: _evaluate_set(run, name, tasks, state) for name, tasks in sets.items() if tasks}
        run.workers.forget_prefixes()  # so that a step is the same whether an evaluation came before it or not
    groups = [group for report in reports.values() for group in report.groups]
    sampled = {} if state.session is None else state.session.named()
    speed = sampled.get("rollout/tokens_per_second", 0.0)
    named = {name: report for name, report in reports.items() if name}
    return EvalReport(groups, _scoring(run.config, EvalSetConfig(dataset="")), speed, sets=named)


def _evaluate_set(run: Run, name: str, tasks: Sequence[Task], state: Collecting) -> EvalReport:
    """The report of one set. Its seeds do not depend on other sets."""
    config = next(
        (one.eval_sets[name] for one in run.config.each_environment.values() if name in one.eval_sets),
        EvalSetConfig(dataset=""),
    )
    whole, limit = run.config.evaluation, config.max_new_tokens
    sampling = replace(
        run.collection.sampling,
        temperature=whole.temperature if config.temperature is None else config.temperature,
        max_new_tokens=limit or whole.max_new_tokens or run.config.rollout.max_new_tokens,
    )
    collection = replace(
        run.collection,
        sampling=sampling,
        group_size=config.samples or whole.samples,
        own_group_sizes=False,  # those are training's
        own_temperatures=False,
        step=0,
    )
    state.first_place = 0
    groups = collect_groups(tasks, run.eval_rewards or run.rewards, run.workers, collection, state)
    return EvalReport(groups, _scoring(run.config, config))


def _scoring(recipe: Recipe, of_set: EvalSetConfig) -> Scoring:
    evaluation = recipe.evaluation
    return Scoring(evaluation.k if of_set.k is None else of_set.k, evaluation.right_from, recipe.seed)


def evaluate_rows(run: Run) -> dict[str, float]:
    """Measures the held-out examples of `data` with the present weights: `eval/loss`, and of pairs `eval/accuracy`
    and `eval/margin`. Each is a mean over all trained tokens, or pairs; of several sets also of each by name."""
    data = run.conversations
    assert data is not None, "held-out examples are of runs on given data"
    layout = replace(run.workers.layout, minibatches=1)
    found: dict[str, Sums] = {}  # by the beginning of the metrics' names
    with run.console.phase("evaluate"):
        for name, samples in data.held_out.items():
            sums = run.workers.measure_held_out(pack(samples, layout, run.algorithm.token_weighting))
            found |= {f"eval/{name}/" if name else "eval/": sums} if sums else {}
    found["eval/"] = added([*found.values()])
    return {f"{begin}{name}": total / count for begin, sums in found.items() for name, (total, count) in sums.items()}


def calibrate(run: Run, tasks: Sequence[Task], limit: int) -> Mapping[str, float]:
    """Calibrates an FP8 cache that has no scales yet, on the first `limit` tokens of the tasks' prompts. Returns what
    it took."""
    if not run.workers.needs_calibration:
        return {}
    chat = run.collection.chat
    return run.workers.calibrate([chat.of(task).first_prompt_tokens(task.prompt, limit) for task in tasks])


def evaluate_checkpoint(
    target: str, recipe: Recipe, *, all_tasks: bool = False, given: Given = NOTHING_GIVEN
) -> EvalReport:
    """Evaluates a run folder (its last checkpoint), a checkpoint, or a model folder by the recipe's environment.

    all_tasks: every task of the environment, not only those held out. given: as of `build_run`.
    """

    def build(folder: Path) -> tuple[Run, int]:
        model = recipe.model.model_copy(update={"preset": None, "init": "pretrained", **trained_model(folder)})
        run = build_run(recipe.model_copy(update={"model": model}), trains=False, given=given)
        try:
            refuse_pruned(folder)
        except UserError:
            run.close()
            raise
        return run, checkpoint_step(folder)

    run, step = read_model(target, build)
    try:
        sets = run.taskset.evaluation_sets(all_tasks=all_tasks)
        calibrate(run, [task for tasks in sets.values() for task in tasks], recipe.model.context_length)
        return replace(evaluate(run, all_tasks=all_tasks), step=step)
    finally:
        run.close()


def evaluate_targets(targets: Sequence[str], recipe: Recipe, *, all_tasks: bool = False) -> dict[str, EvalReport]:
    """Calls `evaluate_checkpoint` for each target in turn, after checking that all exist."""
    for target in targets:
        weights_folder(Path(target))
    return {target: evaluate_checkpoint(target, recipe, all_tasks=all_tasks) for target in targets}


def sample_answers(recipe: Recipe, number: int) -> list[RolloutGroup]:
    """One scored rollout of each of the first `number` training tasks (`octetrl check --sample`). Writes nothing."""
    quiet = recipe.model_copy(update={"logging": recipe.logging.model_copy(update={"console": "quiet"})})
    run = build_run(quiet, trains=False)
    try:
        tasks = run.taskset.next_batch(number)
        calibrate(run, tasks, recipe.rollout.max_prompt_tokens)
        one_each = replace(run.collection.at_step(1), group_size=1, own_group_sizes=False)
        return collect_groups(tasks, run.rewards, run.workers, one_each, Collecting())
    finally:
        run.close()


# ---------------------------------------------------------------- a server's model


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


def build_server_run(recipe: Recipe) -> Run:
    """What an evaluation needs, with a server instead of workers (`engine.backend: openai`). No weights are loaded.

    With `answers: tokens` the recipe's model gives the tokenizer, the chat template and the vocabulary, which must be
    those of the server's model. With `answers: text` the server has all of these, and the recipe's model is not read.
    Raises UserError for what the user can correct, and if the server is not there."""
    server = recipe.engine.openai
    assert server is not None, "validated: engine.backend openai has its section"
    seed_everything(recipe.seed)
    spec, tokenizer = None, cast("Tokenizer", CharacterTokenizer())
    if server.answers == "tokens":
        recipe = with_found_model(recipe, weights=False)
        spec = model_spec(recipe)
        tokenizer = recipe_tokenizer(recipe, spec.vocab_size)
    console = Console(recipe.logging.console, recipe.steps, mismatch_limit=recipe.mismatch.warn_above)
    environments = build_environments(recipe)
    collection = build_collection(recipe, build_chats(recipe, spec, tokenizer, environments))
    taskset = build_tasks(recipe, environments)
    with console.phase("load"):
        if spec is None:
            collection = replace(collection, max_prompt_tokens=NO_LIMIT, context_length=NO_LIMIT)
            backend = OpenaiBackend.of_text(server)
        else:
            length = recipe.model.context_length
            backend = OpenaiBackend.of_tokens(server, spec=spec, tokenizer=tokenizer, context_length=length)
    workers = ServerWorkers(backend, console)
    unread = without_effect(recipe)
    if unread is not None:
        console.warn(unread)
    try:
        rewards, eval_rewards = build_rewards(recipe, spec, environments, tokenizer)
    except BaseException:
        workers.close()
        raise
    return Run(
        config=recipe,
        tokenizer=tokenizer,
        taskset=taskset,
        conversations=None,
        rewards=cast("Rewards", rewards),  # validated: no reward model scores, so there are some
        eval_rewards=eval_rewards,
        algorithm=build_algorithm(recipe.algorithm),
        workers=cast("Workers", workers),  # it generates, which is all that an evaluation asks
        method=GenerateThenLearn(),
        console=console,
        collection=collection,
        lengths=ExpectedLengths(),
    )


def evaluate_server(recipe: Recipe, *, all_tasks: bool) -> EvalReport:
    """Evaluates the model of `engine.openai` by the recipe's environment. all_tasks: not only those held out."""
    run = build_server_run(recipe)
    try:
        return evaluate(run, all_tasks=all_tasks)
    finally:
        run.close()
