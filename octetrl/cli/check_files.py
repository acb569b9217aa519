"""What `octetrl check` finds wrong in files, folders and modules that a recipe names, and what it says of environments:
their share of the tasks, rewards, tools and limits of several turns, and the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from octetrl.cli.output import refuse_unmakeable
from octetrl.config.algorithm import DistillConfig
from octetrl.config.environment import reward_names
from octetrl.config.rules_environment import FILES, refuse_for_turns
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, never_drawn, renamed
from octetrl.data.mixture import read_source
from octetrl.data.tokenizer import read_template, tokenizer_folder
from octetrl.environments.code_scorer import packages_line
from octetrl.environments.dialogue import check_environment, has_agent, is_dialogue, toolbox_of
from octetrl.environments.python_object import rewards_in_run
from octetrl.environments.reward_workers import check_sendable
from octetrl.environments.turns import components_of
from octetrl.models.families import load_reward_spec, load_spec
from octetrl.models.weight_files import checked_headers
from octetrl.process.sandbox import sandbox_for
from octetrl.rollout.chat_tokens import unread
from octetrl.run.callbacks import load_callbacks
from octetrl.run.environment import NOTHING_GIVEN, build_environment, chat_options, try_its_box
from octetrl.run.folder.layout import RECIPE_FILE, process_of, refuse_records, refuse_unwritable
from octetrl.run.recipe_files import missing_files, unknown_metric
from octetrl.run.store import refuse_store
from octetrl.run.tokenizer_process import TokenizerProcess
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError, dangling
from octetrl.system.names import hub_dataset
from octetrl.telemetry.curves import missing_clients
from octetrl.telemetry.notify import notify_problems

ROWS_TRIED = 64  # of each source of conversations: whether the chat template can write them
TASKS_TRIED = 16  # of an environment in Python: whether they can be sent to a reward process


def file_problems(recipe: Recipe, spec: ModelSpec | None) -> Iterator[str]:
    """What the recipe names and is not there, or is wrong in weights' headers. Quick: nothing is loaded or imported.
    `spec`: the model's, None where that is wrong itself."""
    yield from _weight_problems(recipe, reports=spec is None)
    yield from missing_files(recipe)
    yield from unknown_metric(recipe)
    yield from missing_clients(recipe.logging)
    yield from notify_problems(recipe.logging.notify)
    lora = recipe.model.lora
    if lora is not None and lora.path is not None and not Path(lora.path).is_dir():
        yield f"model.lora.path: no folder '{lora.path}'; give a PEFT folder with adapter_config.json" + dangling(
            Path(lora.path)
        )
    for look in (_look_at_output, partial(refuse_store, resumes=True)):
        try:
            look(recipe)
        except UserError as error:
            yield str(error)


def content_problems(recipe: Recipe, spec: ModelSpec | None, tokenizer: TokenizerProcess | None) -> Iterator[str]:
    """What is wrong in tokenizer, adapter, conversations, tasks and modules. `tokenizer`: None where that is wrong."""
    yield from _source_problems(recipe, tokenizer)
    try:
        lost = None if tokenizer is None else tokenizer.unread_variable(recipe.rollout.chat_template_kwargs)
        if lost is not None:
            yield f"rollout.{lost}"
    except UserError:
        pass  # of a tokenizer that does not load, which is reported once
    try:
        _read_adapter(recipe, spec)
    except UserError as error:
        yield str(error)
    try:
        load_callbacks(recipe)
    except UserError as error:
        yield str(error)
    for name, one in alone(recipe).items():
        for read in (_read_dataset, _read_rewards_in_run, partial(check_turns, tokenizer=tokenizer)):
            try:
                read(one)
            except UserError as error:
                yield renamed(str(error), name)


def start_tokenizer(recipe: Recipe, spec: ModelSpec | None) -> tuple[TokenizerProcess | None, str | None]:
    """Begin to load a recipe's tokenizer. Returns what is wrong with its files, if anything. Neither where the model's
    folder is wrong, which is reported once."""
    if recipe.model.tokenizer is None and spec is None:
        return None, None
    field = "" if recipe.model.tokenizer is None else "model.tokenizer: "
    try:
        template, size = recipe.model.chat_template, None if spec is None else spec.vocab_size
        if template is not None:
            read_template(template)
        return TokenizerProcess(tokenizer_folder(recipe), size, field, template), None
    except UserError as error:
        return None, str(error)


def _weight_problems(recipe: Recipe, *, reports: bool) -> Iterator[str]:
    """What is wrong in the headers of the weights that the run will load. reports: also folders of
    further models that can't be read, which the memory estimate reports if there is one."""
    algorithm = recipe.algorithm
    reward_model, critic = recipe.environment.reward_model, recipe.critic.path
    if recipe.model.init == "pretrained":
        scalar = algorithm.name == "reward_model"
        yield from _weight_problem("", str(recipe.model.path), scalar=scalar, new_head=scalar)
    if algorithm.name == "ppo" and critic is not None:
        yield from _weight_problem("critic.path: ", critic, reports=reports, scalar=True, new_head=True)
    if reward_model is not None:
        yield from _weight_problem(
            "environment.reward_model: ", reward_model, reports=reports, scalar=True, new_head=False
        )
    if isinstance(algorithm, DistillConfig) and algorithm.teacher is not None:
        yield from _weight_problem(
            "algorithm.teacher: ", algorithm.teacher, reports=reports, scalar=False, new_head=False
        )


def _weight_problem(field: str, folder: str, *, scalar: bool, new_head: bool, reports: bool = False) -> Iterator[str]:
    """reports: also that config.json is missing, wrong or of another kind of model."""
    try:
        spec = load_spec(folder, scalar=scalar) if new_head or not scalar else load_reward_spec(folder)
    except UserError as error:
        if reports:
            yield str(error) if str(error).startswith(field) else f"{field}{error}"
        return
    try:
        checked_headers(folder, spec, scalar=scalar, new_head=new_head)
    except UserError as error:
        yield f"{field}{error}"


def _look_at_output(recipe: Recipe) -> None:
    """The folder that the run will write may be missing; then the first of its parents that is there must take it.
    It may be that of a run, which is continued with --resume."""
    given = Path(recipe.output_dir)
    try:
        refuse_unwritable(given)
    except OSError as error:
        raise UserError(f"output_dir: '{given}' can't be a folder ({error.strerror}); choose another") from None
    if not given.exists():
        refuse_unmakeable("output_dir", given)
    if not (given / RECIPE_FILE).exists():
        refuse_records(given, was_taken=process_of(given) is not None)


def _read_adapter(recipe: Recipe, spec: ModelSpec | None) -> None:
    lora = recipe.model.lora
    if lora is not None and lora.path is not None and spec is not None:
        from octetrl.models.peft_adapters import check_adapter

        check_adapter(lora, Path(lora.path), spec, is_scalar=recipe.algorithm.name == "reward_model")


def _source_problems(recipe: Recipe, tokenizer: TokenizerProcess | None) -> Iterator[str]:
    kind = recipe.algorithm.learns_from
    if kind == "rollouts":
        return
    held_out = ((name or "eval_dataset", source) for name, source in recipe.held_out_sources.items())
    for name, source in (*recipe.sources.items(), *held_out):
        if hub_dataset(source.path) is None and not Path(source.path).exists():
            continue  # reported as missing
        try:
            rows = read_source(name, source, kind)
            if tokenizer is not None:
                ranks = recipe.algorithm.name == "reward_model"
                problem = tokenizer.row_problem(rows, chat_options(recipe), ROWS_TRIED, ranks)
                yield from () if problem is None else (problem,)
        except UserError as error:
            yield str(error)


def _read_dataset(recipe: Recipe) -> None:
    environment, dataset = recipe.environment, str(recipe.environment.dataset)
    if environment.dataset is None:
        return  # validated: nothing is drawn
    if environment.kind in FILES and hub_dataset(dataset) is None and not Path(dataset).exists():
        return  # reported as missing
    built = build_environment(environment, loads_reward=False)  # which has a check of its own
    try_its_box(environment, built)
    scores_elsewhere = environment.reward_model is not None or environment.judge is not None
    in_processes = not scores_elsewhere and (environment.reward is not None or hasattr(built, "score"))
    if environment.kind == "python" and in_processes:
        for task in islice(built.tasks, TASKS_TRIED):
            check_sendable(task)


def _read_rewards_in_run(recipe: Recipe) -> None:
    rewards_in_run(recipe.environment, NOTHING_GIVEN)


def check_turns(recipe: Recipe, tokenizer: TokenizerProcess | None) -> None:
    """Raise UserError for an incomplete environment, or one whose tools the model cannot call. tokenizer: None where
    it is wrong itself, then tools are not checked."""
    environment = _dialogue(recipe)
    if environment is None:
        return
    refuse_for_turns(recipe, has_agent=has_agent(environment))
    calls_tools = False
    if toolbox_of(environment).tools:
        if tokenizer is None:
            return
        calls_tools = tokenizer.tool_format(recipe.rollout.tool_format) is not None
        if calls_tools and (lost := unread(tokenizer.template_names(), (), toolbox_of(environment).schemas())):
            raise UserError(f"environment.{lost}")
    replaced = recipe.environment.reward is not None or recipe.environment.judge is not None
    has_scorer = replaced or hasattr(environment, "score")
    check_environment(environment, calls_tools, has_scorer=has_scorer)


def turns_line(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """A line about the rollouts, if they have several turns."""
    environment, turns = _dialogue(recipe), recipe.environment.turns
    if environment is None:
        return
    weighted = [
        f"{component.weight:g} x {component.name}"
        for component in components_of(environment)
        if component.weight is not None
    ]
    if recipe.environment.reward is not None:
        weighted = list(reward_names(recipe.environment.reward))
    elif recipe.environment.judge is not None:
        weighted = [f"the judge {recipe.environment.judge.model}"]
    elif hasattr(environment, "score"):
        weighted.append("score")
    parts = [f"at most {turns.max_turns}", f"rewarded by {' + '.join(weighted)}"]
    tools = toolbox_of(environment).tools
    yield "turns", ", ".join([*parts, f"tools {', '.join(tools)}"] if tools else parts)


def _dialogue(recipe: Recipe) -> Any:
    """The recipe's environment, if it has several turns and can be loaded."""
    given = recipe.environment
    if given.dataset is None or (given.kind in ("reasoning_gym", *FILES) and not given.tools):
        return None
    try:
        environment = build_environment(given)
    except UserError:  # said where datasets are read
        return None
    return environment if is_dialogue(environment) else None


def environment_lines(recipe: Recipe, *, imports: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of each environment. imports: whether modules of the user may be imported for it."""
    total = sum(environment.weight for environment in recipe.environments.values())
    for name, one in alone(recipe).items():
        config = one.environment
        if config.dataset is not None:
            share = f"{recipe.environments[name].weight / total:.1%} of the tasks, " if name else ""
            label = f"environment {name}" if name else "environment"
            yield label, f"{config.kind} {config.dataset}, {share}{config.held_out_text}"
            yield from turns_line(one) if imports else ()
            if config.curriculum is not None:
                yield "curriculum", config.curriculum.text
        if config.box is not None:
            image = config.box.image or "this machine's programs"
            yield "box", f"{config.box.kind}, {image}, network {config.box.network}"
        if config.kind == "code" or "python" in config.tools:
            yield from _sandbox(config.sandbox)
    for line in never_drawn(recipe):
        yield "warning", line


def _sandbox(config: SandboxConfig) -> Iterator[tuple[str, str]]:
    """The level in force, and what it does not protect from. Where there is none, the checks of files say so."""
    try:
        sandbox = sandbox_for(config)
    except UserError:
        return
    yield "sandbox", f"level {sandbox.level}, {sandbox.interpreter.executable}; not protected from:"
    for gap in sandbox.level.gaps():
        yield "", gap
    if line := packages_line(config):
        yield "warning", line
