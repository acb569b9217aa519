"""`octetrl check`: what a recipe means, before anything is built: essentials, what is FP8, memory by part, problems.

The shape comes from config.json, the device from nvidia-smi. Torch only counts the GPUs for several workers. A recipe
for a machine elsewhere is checked with that machine's memory: `--memory-gib 140`. Quick checks come first: if names
or sizes are wrong, no tokenizer is waited for and no score is called. `--eval` checks an evaluation by a server
(`engine.backend: openai`), of which nothing is asked. `--sample N` draws N answers and shows them with their rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.arguments import Overrides, RecipePath, worker_problems
from octetrl.cli.check_files import content_problems, environment_lines, file_problems, start_tokenizer
from octetrl.cli.check_machine import (
    PLANNED,
    Device,
    architecture_named,
    backend_lines,
    backend_problems_here,
    find_device,
    kernel_lines,
    missing_fp8,
    missing_gpu,
    weight_problems,
    worker_lines,
)
from octetrl.cli.check_memory import MemoryPlan, memory_lines, role_sections, worker_memory_lines
from octetrl.cli.fitting import Change
from octetrl.cli.output import print_lines, print_spans
from octetrl.config.algorithm import DistillConfig
from octetrl.config.in_words import describe_tail, drafts_without_effect, range_text, without_effect
from octetrl.config.load import load_recipe
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.rules_shape import experts_refused_on_gpu, spec_problems
from octetrl.config.schema import OpenaiConfig, Recipe
from octetrl.data.mixture import read_source, steps_of
from octetrl.data.rows import read_rows
from octetrl.data.tasks import SAMPLING
from octetrl.endpoint import lacking
from octetrl.environments.python_object import search_beside
from octetrl.fp8.parity import PROVEN, refused_gate, why_measured, why_no_fixed_order
from octetrl.fp8.policy import LinearFormat, PrecisionPolicy, Side, precision_policy, tokens_that_pay
from octetrl.fp8.slow_paths import slow_paths
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.published_codes import describe_published_codes
from octetrl.run.environment import chat_options, try_objective
from octetrl.run.folder.layout import RECIPE_FILE
from octetrl.run.model_source import is_of_hub
from octetrl.run.recipe_files import with_found_model
from octetrl.run.rehearsal import FirstPrompt, rehearse
from octetrl.run.tokenizer_process import TokenizerProcess
from octetrl.shapes.blocks import StackedLinearLayout
from octetrl.shapes.model_cuts import largest_cut
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.text import binary_size, counted, escaped
from octetrl.telemetry.rollouts import Span
from octetrl.telemetry.sinks import said_in
from octetrl.workers.model_shape import model_spec, preset_of_missing

if TYPE_CHECKING:
    from octetrl.records import Rollout

MANY_TOKENS = 1 << 17  # of a micro-batch; more are no advice
SMALLEST_GIB, LARGEST_GIB = 0.001, 1e6  # of --memory-gib: a petabyte is no device's, infinity no number of bytes
MemoryGib = Annotated[
    float | None,
    typer.Option("--memory-gib", help="Plan for a GPU with this much memory; 0.001 to 1,000,000.", show_default=False),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="ARCHITECTURE",
        help="Say which kernels a GPU of this architecture runs: sm_80, sm_89, sm_90, sm_100 or sm_120.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        "--sample",
        min=0,
        max=1000,
        help="Show what is trained on: the first prompt, or this many rows, as the model reads them. With a number also"
        " draw this many answers, and show them with their rewards.",
    ),
]
Evaluates = Annotated[bool, typer.Option("--eval", help="Check an evaluation by a server (engine.backend=openai).")]
MOST_CHARACTERS = 600  # of a prompt or an answer: its end is left out


def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    memory_gib: MemoryGib = None,
    gpu: Gpu = None,
    sample: Sample = None,
    evaluates: Evaluates = False,
) -> None:
    """Show what a recipe means, what it needs, and every problem it has."""
    if memory_gib is not None and not SMALLEST_GIB <= memory_gib <= LARGEST_GIB:
        raise UserError(
            f"--memory-gib: {memory_gib:g} is no GPU's memory; give {SMALLEST_GIB:g} to {LARGEST_GIB:,.0f}, as 140"
        )
    overrides = overrides or []
    if evaluates:
        _check_server(recipe, overrides, only=memory_gib is None and gpu is None and sample is None)
        return
    capability = None if gpu is None else architecture_named(gpu)
    resolved = load_recipe(recipe, overrides)
    search_beside(recipe)
    resolved, model_problem = _with_model(resolved)
    if sample and (memory_gib or capability) and resolved.algorithm.learns_from == "rollouts":
        raise UserError("--sample: it draws answers on this machine; leave --memory-gib and --gpu out")
    problems: list[str] = []
    if model_problem is not None:
        problems.append(model_problem)
    spec = None
    try:
        spec = model_spec(resolved) if model_problem is None else None
    except UserError as error:
        problems.append(str(error))
    tokenizer, wrong_files = start_tokenizer(resolved, spec)  # it loads while the rest is checked
    with tokenizer or nullcontext():
        problems += [] if wrong_files is None else [wrong_files]
        problems += file_problems(resolved, spec)
        device = find_device(resolved, memory_gib, capability)
        problems += [*missing_gpu(resolved, device), *missing_fp8(resolved, device)]
        if device.is_here:
            problems += [*worker_problems(resolved.cluster), *backend_problems_here(resolved, device, PLANNED)]
        print_lines("recipe", _essentials(resolved, device, imports=not problems))
        preset = preset_of_missing(resolved) if spec is None else None
        shape = spec if preset is None else spec_from_config(preset_config(preset))
        if shape is None:
            print_lines("model", iter([("not shown", "its shape, precision and memory: there is no model yet")]))
        found, too_large = _plan(recipe, overrides, resolved, shape, device, preset)
        problems += found
        if problems:
            print_lines("rehearsal", iter([("not tried", "tasks, tokenizer and score; the problems below come first")]))
            _refuse(recipe, problems, too_large)
        rehearsed, prompts = _rehearsal_problems(resolved, spec, tokenizer)
        problems = [*_own_objective(resolved), *rehearsed]
        if sample is not None and not problems and tokenizer is not None:
            _show_rows(resolved, tokenizer, sample) if prompts is None else _show_prompts(resolved, prompts)
    _refuse(recipe, list(dict.fromkeys(problems)), too_large)
    if sample and resolved.algorithm.learns_from == "rollouts":
        _refuse_problems(recipe, _show_sample(resolved, sample))
    typer.echo("no problems")


def _plan(
    name: str, overrides: Sequence[str], recipe: Recipe, spec: ModelSpec | None, device: Device, preset: str | None
) -> tuple[list[str], str | None]:
    """Show model, precision and memory. Returns what is wrong with them, and whether the memory is too small. `preset`:
    where `spec` is from, if the model's folder is not there."""
    problems: list[str] = []
    if spec is None:
        return problems, None
    try:
        problems += [problem.text for problem in spec_problems(recipe, spec)]
        policy = precision_policy(spec, recipe.fp8)
        problems += policy_problems(recipe, spec, policy, device)
        print_lines("model", _model(recipe, spec, preset))
        print_lines("precision", chain(_precision(recipe, spec, policy, device), backend_lines(recipe)))
        plan = MemoryPlan.of(recipe, largest_part(recipe, spec), policy, device)
        both = chain(memory_lines(plan), worker_memory_lines(plan))
        for title, lines in [("memory", both)] if recipe.cluster.roles is None else role_sections(plan):
            print_lines(title, lines)
        known = set(problems)

        def is_allowed(changes: Sequence[Change]) -> bool:
            changed = _changed(name, overrides, changes)
            return changed is not None and known.issuperset(
                [
                    *(problem.text for problem in spec_problems(changed, spec)),
                    *policy_problems(changed, spec, policy, device),
                ]
            )

        return problems, plan.problem(is_allowed)
    except UserError as error:
        return [*problems, str(error)], None


def policy_problems(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: Device) -> list[str]:
    """What of the recipe contradicts the formats of its tensors, the kernels of a GPU or the number of workers."""
    why = [refused_gate(recipe, policy, on_gpu=device.on_gpu, capability=device.capability)]
    if device.on_gpu:
        why += [spec.refused_on_gpu(), experts_refused_on_gpu(recipe, spec, policy.precisions())]
    return [*(each for each in why if each is not None), *weight_problems(recipe, policy)]


def _own_objective(recipe: Recipe) -> list[str]:
    """Show the user's own objective, if there is one. Returns what is wrong with it."""
    try:
        own = try_objective(recipe)
    except UserError as error:
        return [str(error)]
    print_lines("objective", iter([] if own is None else [(recipe.algorithm.name, own)]))
    return []


def _with_model(recipe: Recipe) -> tuple[Recipe, str | None]:
    """The recipe with the folder of its model, and what is wrong with the model's name. Of a model of the hub only the
    settings are fetched, so its weights are not checked."""
    try:
        found = with_found_model(recipe, weights=False)
    except UserError as error:
        return recipe, str(error)
    if recipe.model.path is not None and is_of_hub(recipe.model.path):
        found = found.model_copy(update={"model": found.model.model_copy(update={"init": "random"})})
    return found, None


def _changed(recipe: str, overrides: Sequence[str], changes: Sequence[Change]) -> Recipe | None:
    """The recipe with these changes. None: it is refused before its model is looked at."""
    try:
        return load_recipe(recipe, [*overrides, *chain.from_iterable(change.overrides for change in changes)])
    except UserError:
        return None


def _refuse(recipe: str, problems: Sequence[str], too_large: str | None) -> None:
    """Exit code 2 for wrong input, 1 for a sound recipe that needs more memory than there is."""
    if too_large is not None and not problems:
        typer.echo(f"octetrl: {recipe}: {too_large}", err=True)
        raise typer.Exit(1)
    _refuse_problems(recipe, [*problems, too_large] if too_large is not None else problems)


def largest_part(recipe: Recipe, spec: ModelSpec) -> ModelSpec:
    """What the worker with the largest part of the model has; a model that cannot be cut whole."""
    return spec.cut(largest_cut(spec, recipe.cluster.tensor_parallel))


def _essentials(recipe: Recipe, device: Device, *, imports: bool) -> Iterator[tuple[str, str]]:
    rollout, algorithm, optimizer = recipe.rollout, recipe.algorithm, recipe.trainer.optimizer
    if isinstance(algorithm, DatasetSettings):
        what = "conversations" if algorithm.learns_from == "conversations" else "pairs"
        paths = ", ".join(source.path for source in recipe.sources.values())
        yield "algorithm", f"{algorithm.name}, {algorithm.batch_size} {what} a step from {paths}"
        if recipe.holds_out_rows:
            held_out = ", ".join(one.path for one in recipe.held_out_sources.values())
            when = f"every {counted(recipe.evaluation.every, 'step')} and " if recipe.evaluation.every else ""
            yield "held out", f"{held_out or f'{recipe.data.eval_size:,} {what}'}, measured {when}after the last step"
    else:
        size = f"{rollout.prompts_per_step} prompts x {range_text(recipe.group_sizes)} siblings a step"
        several = [one.temperature or rollout.temperature for one in recipe.environments.values()]
        temperatures = range_text(several or [rollout.temperature])
        yield "algorithm", f"{algorithm.name}, {size}, temperature {temperatures}"
        by_row = {ours for one in recipe.each_environment.values() for ours in one.columns} & {*SAMPLING}
        if by_row:
            yield "", f"a row's own {' and '.join(sorted(by_row))} replaces that"
        tail = describe_tail(recipe)
        if tail is not None:
            yield "beside tail", tail
    yield "steps", f"{_length(recipe)}, seed {recipe.seed}, into {recipe.output_dir}"
    if Path(recipe.output_dir, RECIPE_FILE).exists():
        yield "", f"{recipe.output_dir} already holds a run; only --resume continues it"
    yield "optimizer", f"AdamW, lr {optimizer.lr:g}, {optimizer.decay}, {optimizer.warmup_steps} warm-up steps"
    longest = f"{rollout.max_prompt_tokens:,} prompt + {rollout.max_new_tokens:,} answer tokens"
    lora = recipe.model.lora
    if lora is not None:
        beginning = "newly initialised" if lora.path is None else f"from {lora.path}"
        targets = "all projections" if lora.targets is None else ", ".join(lora.targets)
        targets += " and of each expert" if lora.experts else ""
        yield "LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, on {targets}; {beginning}"
    yield "lengths", f"{longest}, context {recipe.model.context_length:,}"
    if isinstance(algorithm, DistillConfig):
        yield "teacher", f"{algorithm.teacher}, {algorithm.teacher_precision}, {algorithm.distillation}"
    yield from environment_lines(recipe, imports=imports)
    yield "device", device.name
    yield from worker_lines(recipe)


def _length(recipe: Recipe) -> str:
    """The number of steps; of epochs, what they are with the rows that are there."""
    if recipe.epochs is None or not isinstance(recipe.algorithm, DatasetSettings):
        return f"{recipe.steps:,}"
    try:
        sources = recipe.sources.values()
        rows = sum(1 for one in sources for _ in read_rows(one.path, split=one.split, subset=one.subset))
    except UserError:  # reported with the files
        return f"{recipe.epochs:g} epochs"
    steps = steps_of(recipe.epochs, rows - recipe.data.eval_size, recipe.algorithm.batch_size)
    most = "at most " if recipe.data.too_long == "drop" or recipe.data.eval_size else ""
    return f"{most}{steps:,} ({recipe.epochs:g} epochs of {rows - recipe.data.eval_size:,} examples)"


def _model(recipe: Recipe, spec: ModelSpec, preset: str | None) -> Iterator[tuple[str, str]]:
    if preset is not None:
        yield "files", f"not there; the shape of the preset {preset} is assumed"
    yield "parameters", f"{spec.num_parameters:,} ({'tied' if spec.tied_embeddings else 'untied'} embeddings)"
    experts = [first for layer in range(spec.num_layers) if (first := _experts(spec, layer)) is not None]
    dense = f", MLP {spec.intermediate_size}" * (len(experts) < spec.num_layers)
    whose = "" if spec.hf_config is None else ", by transformers' modules"
    yield "shape", f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}{dense}{whose}"
    if experts:
        one, where = experts[0], f"in {len(experts)} of {spec.num_layers} layers"
        yield "experts", f"{one.count} of width {one.parts[0].rows} {where}, {one.per_token} for each token"
    if spec.calibrates:
        yield "heads", f"{spec.num_heads} query, {spec.num_kv_heads} KV, of {spec.head_size}"
    else:
        cached = ", ".join(f"{tensor.name} of {tensor.num_values}" for tensor in spec.cached(0))
        yield "heads", f"{spec.num_heads} of {spec.head_size} with latent attention; all share {cached}"
    deltas = [block for _, block in spec.named_blocks() if isinstance(block, GatedDeltaLayout)]
    if deltas:
        shape, state = deltas[0].shape, spec.state_bytes(recipe.model.value_bytes, recipe.engine.most_rows)
        heads = (
            f"{shape.key_heads} key heads of {shape.key_size}, {shape.value_heads} value heads of {shape.value_size}"
        )
        yield "linear attention", f"in {len(deltas)} of {spec.num_layers} layers, {heads}"
        yield "", f"a sequence's state takes {binary_size(state)}, and so does each of engine.state_snapshots"
    windows = [getattr(spec.blocks_of(layer).attention, "window", None) for layer in range(spec.num_layers)]
    if narrow := [window for window in windows if window is not None]:
        sizes = " or ".join(f"{size:,}" for size in sorted(set(narrow)))
        yield "windows", f"{sizes} keys in {len(narrow)} of {spec.num_layers} layers; older pages stay in the KV cache"
    yield "vocabulary", f"{spec.vocab_size:,}"
    weights = describe_published_codes(recipe, spec)
    if weights is not None:
        yield "weights", weights


def _experts(spec: ModelSpec, layer: int) -> StackedLinearLayout | None:
    """The first stacked linear of a layer's experts; None: its MLP is dense."""
    linears = spec.blocks_of(layer).mlp.linears(spec)
    return next((linear for linear in linears if isinstance(linear, StackedLinearLayout)), None)


def _precision(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    yield "", f"{'rollout':<16}training"
    for kind, linears in policy.kinds().items():
        rollout, train = _share(linears, "rollout", policy.mx), _share(linears, "train", policy.mx)
        yield kind, f"{rollout:<16}{train}"
    if policy.kv_mode == "none":
        yield "KV cache", recipe.model.dtype
    else:
        scales = "dynamic scales" if policy.kv_mode == "dynamic" else "a scale for each token"
        if policy.kv_mode == "calibrated":
            scales = f"calibrated scales ({recipe.fp8.calibration})"
        codes = "int8" if policy.kv_mode == "int8" else "fp8"
        replay = "replayed in training" if recipe.fp8.kv_replay else "not replayed in training"
        formats = ", ".join(f"{name} {codes if stored == 'fp8' else stored}" for name, stored in policy.cache)
        yield "KV cache", f"{formats}, {scales}, {replay}"
        cached = dict.fromkeys(tensor for layer in range(spec.num_layers) for tensor in spec.cached(layer))
        for tensor in cached:
            if tensor.never_fp8 is not None:
                yield "", f"{tensor.name} stays BF16: {tensor.never_fp8}"
            elif policy.cached_as(tensor.name) == "bf16":
                yield "", f"{tensor.name} stays BF16: fp8.kv_cache_tensors is {recipe.fp8.kv_cache_tensors}"
    yield "everything else", f"{recipe.model.dtype}; log-softmax and loss float32"
    yield from kernel_lines(policy, device)
    yield from _parity(recipe, policy, device)
    given, wanted = recipe.trainer.tokens_per_micro_batch, tokens_that_pay(spec.hidden_size)
    if policy.uses_fp8("train") and device.on_gpu and not recipe.fp8.is_emulated and given < wanted:
        text = f"FP8 training is hardly faster than BF16 with {given:,} tokens a micro-batch at this width;"
        larger = f" raise trainer.tokens_per_micro_batch to {wanted:,} or more, or" if wanted <= MANY_TOKENS else ""
        yield "warning", f"{text}{larger} take precision: bf16"


def _parity(recipe: Recipe, policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    """Whether the two sides' log-probs will be equal, and if not why; which side of a GPU's run is not fused."""
    why = why_measured(recipe, policy, on_gpu=device.on_gpu, capability=device.capability)
    if why is None:
        stale = " of samples that are not stale" if recipe.cluster.max_staleness else ""
        yield "parity", f"promised: one order of sums on both sides, so equal log-probs{stale}"
    else:
        yield "parity", f"measured: {why}"
    for line in slow_paths(recipe, policy, on_gpu=device.on_gpu):
        yield "warning", line
    unread = drafts_without_effect(recipe)
    if unread is not None:
        yield "warning", unread
    speculation = recipe.engine.speculation
    if speculation.name != "none" and recipe.algorithm.learns_from == "rollouts":
        most = f"up to {speculation.max_draft_tokens} drafts a sequence while at most {speculation.max_sequences} run"
        yield "speculation", f"{speculation.name}, {most}; answers keep their bits"
        if not recipe.logging.rollouts:
            yield "", "logging.rollouts is false, so a resumed run makes no drafts from the answers of earlier steps"
        unproven = policy.modules_of not in (None, *PROVEN)
        if unproven or (device.on_gpu and why_no_fixed_order(recipe, policy, "rollout") is not None):
            yield (
                "warning",
                "engine.speculation may change answers, because here a row's bits may depend on the number of rows;"
                " take model.dtype bfloat16, or engine.speculation.name none",
            )


def _share(linears: Sequence[LinearFormat], side: Side, mx: bool) -> str:
    """`fp8` or `mxfp8`, `bf16`, or how many of the layers are FP8."""
    formats = [linear.rollout if side == "rollout" else linear.train for linear in linears]
    count, name = formats.count("fp8"), "mxfp8" if mx else "fp8"
    return "bf16" if count == 0 else name if count == len(formats) else f"{name} in {count} of {len(formats)}"


def _check_server(path: str, overrides: Sequence[str], *, only: bool) -> None:
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
        _refuse_problems(path, problems)
        problems, _ = _rehearsal_problems(_without_weights(recipe), None, tokenizer)
    _refuse_problems(path, list(dict.fromkeys(problems)))
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
        template = recipe.model.chat_template or "its chat template"
        yield "answers", f"token ids and log-probs; tokenizer of {folder}, {template}"
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


def _rehearsal_problems(
    recipe: Recipe, spec: ModelSpec | None, tokenizer: TokenizerProcess | None
) -> tuple[list[str], list[FirstPrompt] | None]:
    """Load tokenizer, tasks and modules, call the score, and show what it gives. Returns what is wrong, and the first
    prompt of each environment; None if the recipe learns from rows."""
    problems = list(content_problems(recipe, spec, tokenizer))
    rehearsal = rehearse(recipe, tokenizer)
    problems += rehearsal.problems
    try:
        if tokenizer is not None:
            tokenizer.wait()
    except UserError as error:
        problems.append(str(error))
    print_lines("rehearsal", iter(rehearsal.lines))
    return problems, rehearsal.prompts if recipe.algorithm.learns_from == "rollouts" else None


def _show_prompts(recipe: Recipe, prompts: Sequence[FirstPrompt]) -> None:
    """The first prompt of each environment as the model reads it, and where the trained tokens begin."""
    most = recipe.rollout.max_new_tokens
    for prompt in prompts:
        typer.echo(f"task {escaped(prompt.task_id)}: what the model reads, and what is trained on")
        after = Span(True, f"(the policy's answer, of at most {counted(most, 'token')})", None)
        print_spans([Span(False, prompt.text, prompt.num_tokens), after])


def _show_rows(recipe: Recipe, tokenizer: TokenizerProcess, number: int) -> None:
    """The first rows as the trainer reads them, with what is trained on."""
    kind, (name, source) = recipe.algorithm.learns_from, next(iter(recipe.sources.items()))
    assert kind != "rollouts", "rollouts have no rows"
    rows = tokenizer.row_spans(read_source(name, source, kind), chat_options(recipe), max(number, 1))
    for place, samples in rows:
        for title, spans in samples:
            trained = sum(span.tokens or 0 for span in spans if span.is_trained)
            whole = counted(sum(span.tokens or 0 for span in spans), "token")
            typer.echo(f"{escaped(place)}{title}: {whole}, of which {trained:,} are trained on")
            print_spans(spans)


def _refuse_problems(recipe: str, problems: Sequence[str]) -> None:
    """Raise UserError if there are any. recipe: its name."""
    if len(problems) == 1:
        raise UserError(f"{recipe}: {problems[0]}")
    if problems:
        raise UserError("\n  ".join([f"{recipe}: {len(problems)} problems", *problems]))


def _show_sample(recipe: Recipe, number: int) -> list[str]:
    """Draw `number` answers and print each with its prompt and reward. Returns what is wrong: none has a reward."""
    from octetrl.run.evaluate import sample_answers

    typer.echo(f"sample of {number}")
    drawn = [group.rollouts[0] for group in sample_answers(recipe, number)]
    for place, rollout in enumerate(drawn, start=1):
        for line in _sample_lines(place, rollout):
            typer.echo(line)
    if any(rollout.reward is not None for rollout in drawn):
        return []
    statuses = Counter(rollout.status.value for rollout in drawn)
    why = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return [f"none of {counted(len(drawn), 'sampled answer')} has a reward ({why}); a run would end at its first step"]


def _sample_lines(place: int, rollout: Rollout) -> Iterator[str]:
    tokens = sum(len(turn.completion.token_ids) for turn in rollout.turns)
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    yield f"  {place}. task {rollout.task.id}: {reward}, {rollout.status}, {counted(tokens, 'token')}"
    if rollout.task.answer is not None:
        yield f"     reference  {_shortened(rollout.task.answer)}"
    yield f"     prompt     {_shortened(rollout.task.text)}"
    for by, text in said_in(rollout):
        yield f"     {by:<11}{_shortened(text)}"
    if rollout.detail is not None:
        yield f"     detail     {_shortened(rollout.detail)}"


def _shortened(text: str) -> str:
    """On one line, without control characters."""
    line = escaped(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ...")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
