"""The run of a bench's arm: the steps of `octetrl train` (run/loop.py), with nothing to read or to score.

tasks      random prompts, new ones for every step; all steps have the workload's lengths, the first ones are short
rewards    random numbers, so every group has advantages

step       the recipe's own method: generate and learn, beside the tail of the rollout, or ahead
rollout    a step that only generates, by workers without an optimizer
train      a step that only learns, from the same random samples
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.arms import Arm
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer, load_tokenizer
from octetrl.environments.scoring import Key, Score, ScoringRound
from octetrl.environments.tasks import Taskset
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import Loading, filling
from octetrl.models.decoder import Decoder
from octetrl.models.random_weights import EMBEDDING_STD
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.records import PackedBatch, PolicyUpdate, Prompt, RolloutStatus, Sample, Task, joined
from octetrl.rollout.backend import SessionRecord
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import CollectionSettings, ExpectedLengths
from octetrl.run.build import method_of
from octetrl.run.device import seed_everything
from octetrl.run.folder.journal import Journal
from octetrl.run.state import Run, StepMethod, StepResult
from octetrl.run.step import learn, produce
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.telemetry.console import Console
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.assignment import Costs
from octetrl.workers.build import BuiltWorker, Role, fill_weights, keep_codes, resolve_device
from octetrl.workers.build_workers import admission_of, start_team, workers_on
from octetrl.workers.team import Deadlines, LocalTeam
from octetrl.workers.worker import Worker
from octetrl.workers.workers import Workers


class NoText:
    """The tokenizer of a model with random weights: tokens have no text, and none of them ends an answer."""

    eos_token_id = None
    is_fast = False

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return ""


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a pretrained model, or `NoText`."""
    if recipe.model.init == "random" or recipe.model.path is None:
        return NoText()
    return load_tokenizer(recipe.model.path)


def bench_worker(
    spec: ModelSpec,
    recipe: Recipe,
    device: torch.device,
    *,
    trains: bool = True,
    draws: bool = True,
    peers: Peers = ALONE,
    loaders: Peers | None = None,
) -> Worker:
    """A worker as a run builds it, or of its part of the model. `spec`: of the whole model, which may have fewer layers
    than the recipe's. `draws` false: others generate."""
    return Worker(
        recipe,
        spec=spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        policy=precision_policy(spec, recipe.fp8),
        tokenizer=tokenizer_of(recipe),
        algorithm=build_algorithm(recipe.algorithm),
        load_weights=lambda model, loading: _fill(model, recipe, loading),
        device=device,
        trains=trains,
        draws=draws,
        peers=peers,
        loaders=loaders,
    )


def hosted_bench_worker(
    spec: ModelSpec, recipe: Recipe, device: torch.device, *, trains: bool, peers: Peers, loaders: Peers, role: Role
) -> BuiltWorker:
    """The same in a process of its own, for `WorkerPlan.build`."""
    does = {"trains": trains and role != "generates", "draws": role != "trains"}
    worker = bench_worker(spec, recipe, device, peers=peers, loaders=loaders, **does)
    if role == "generates":
        keep_codes(worker)
    return BuiltWorker(worker, loaded=worker.loaded)


def _fill(model: Decoder, recipe: Recipe, loading: Loading | None) -> None:
    if recipe.model.init == "random":
        draw_on_device(model, recipe.seed)
    else:
        fill_weights(model, recipe, loading)


@torch.no_grad()
def draw_on_device(model: Decoder, seed: int) -> None:
    """Like `Decoder.random_init`, but on the device, which creates billions of numbers a second. A part of a model gets
    its rows of the whole weights."""
    generator = torch.Generator(model.lm_head_weight.device).manual_seed(seed)
    fill, cut = filling(model), cut_rows_of(model.spec, model.lora)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
            rows = cut.get(name)
            with fill(name):
                drawn = parameter if rows is None else parameter.new_empty(rows.whole_rows, *parameter.shape[1:])
                drawn.normal_(std=std, generator=generator)
                if rows is not None:
                    parameter.copy_(torch.cat([drawn[piece.whole : piece.whole + piece.rows] for piece in rows.pieces]))


def code_bytes(model: Decoder) -> int:
    """Bytes of codes and scales that a publish renews; 0 if nothing is FP8."""
    return sum(linear.codes.numel() + 4 * linear.scale.numel() for _, linear in model.float8_linears())


def free_memory(device: torch.device) -> None:
    """Free the memory of an arm that has no references left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


LIMITS = "answer_limits"  # of a task's metadata: tokens of each sibling's answer


class WorkloadTasks(Taskset):
    """A batch is the groups of the workload, each with its lengths. The answers of the first `short` batches are
    short."""

    def __init__(self, arm: Arm, short: int) -> None:
        self._workload, self._short, self._batch = arm.workload, short, 0

    def next_batch(self, n: int) -> list[Task]:
        groups, batch = self._workload.groups, self._batch
        assert n == len(groups), "a step has the whole workload"
        self._batch += 1
        limits = self._workload.short(batch) if batch < self._short else [answers for _, answers in groups]
        return [
            Task(id=f"bench {batch}/{place}", prompt=f"{batch} {place} {prompt}", metadata={LIMITS: limits[place]})
            for place, (prompt, _) in enumerate(groups)
        ]

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        self._batch = state["batch"]


class RandomTokens(ChatTokens):
    """A prompt "batch place tokens" becomes so many random tokens, which follow from it and the seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def of(self, task: Task) -> Self:
        return self

    def prompt_tokens(self, prompt: Prompt, limit: int | None = None) -> tuple[int, ...]:
        draw = random.Random(f"{self._seed} {prompt}")
        return tuple(draw.choices(range(self._vocab_size), k=int(str(prompt).split()[-1])))

    def first_prompt_tokens(self, prompt: Prompt, limit: int) -> tuple[int, ...]:
        return self.prompt_tokens(prompt)[:limit]


class RandomRewards(ScoringRound):
    """Scores each answer at once, by its task and sibling. It is its own round, which never waits."""

    is_done = True

    def __init__(self, seed: int) -> None:
        self._seed, self._scores = seed, dict[Key, Score]()

    def begin(self) -> Self:
        self._scores = {}
        return self

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        reward = random.Random(f"{self._seed} {task.id} {key[1]}").random()
        self._scores[key] = Score(RolloutStatus.SCORED, reward)

    def so_far(self) -> dict[Key, Score]:
        return dict(self._scores)

    def finish(self) -> dict[Key, Score]:
        return self._scores

    def close(self) -> None:
        pass


class GenerateOnly(StepMethod):
    """Generates, and keeps the engine's record of each step."""

    def __init__(self) -> None:
        self.sessions: list[SessionRecord] = []

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        collected = produce(run, number)
        assert collected.session is not None, "every prompt fits"
        self.sessions.append(collected.session)
        return StepResult(joined(collected.metrics), collected.groups)


class LearnOnly(StepMethod):
    """Learns from samples of the workload's lengths, with random tokens and advantages. Their log-probs are those of a
    uniform distribution."""

    def __init__(self, arm: Arm) -> None:
        rng, vocab_size = random.Random(arm.recipe.seed), arm.spec.vocab_size
        self._samples = [
            Sample(
                token_ids=tuple(rng.choices(range(vocab_size), k=prompt + answer)),
                loss_mask=(False,) * prompt + (True,) * answer,
                generator_logprobs=(0.0,) * prompt + (-math.log(vocab_size),) * answer,
                advantage=rng.gauss(0.0, 1.0),
                policy_version=0,
            )
            for prompt, answer in arm.workload.siblings
        ]

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        version = run.workers.policy_version
        return StepResult(learn(run, [replace(sample, policy_version=version) for sample in self._samples], number))


class EmbeddedWorkers(Workers):
    """The worker of this process, which tells the peak of learning from that of the whole step."""

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        update = super().train(batch)
        peak = update.metrics.get("memory/peak_gb")
        return update if peak is None else replace(update, metrics={**update.metrics, "memory/learn_peak_gb": peak})


@contextmanager
def bench_run(arm: Arm) -> Iterator[Run]:
    """The run of an arm, with its workers. Raises UserError."""
    seed_everything(arm.recipe.seed)
    with _embedded(arm) if not arm.recipe.cluster.uses_ray else _on_ray(arm) as workers:
        run = _run_of(arm, workers)
        try:
            yield run
        finally:
            run.close()


@contextmanager
def _embedded(arm: Arm) -> Iterator[Workers]:
    device = resolve_device(arm.recipe.cluster)
    worker = bench_worker(arm.spec, arm.recipe, device, trains=arm.verb != "rollout")
    try:
        console = Console("quiet", arm.recipe.steps)
        yield EmbeddedWorkers(LocalTeam(BuiltWorker(worker), console), console, worker)
    finally:
        worker.engine.sleep()
        del worker
        free_memory(device)


@contextmanager
def _on_ray(arm: Arm) -> Iterator[Workers]:
    recipe, trains = arm.recipe, arm.verb != "rollout"
    deadlines = Deadlines(recipe.cluster.deadlines)
    team = start_team(recipe, None, deadlines, trains=trains, build=partial(hosted_bench_worker, arm.spec))
    try:
        admission = admission_of(arm.spec, tokenizer_of(recipe), recipe.model.context_length)
        console, costs = Console("quiet", recipe.steps), Costs.of(arm.spec, recipe.cluster)
        yield workers_on(team, recipe, costs, deadlines, console, admission, trains=trains)
    finally:
        team.close()


def _run_of(arm: Arm, workers: Workers) -> Run:
    recipe = arm.recipe
    collection = CollectionSettings.from_config(
        RandomTokens(arm.spec.vocab_size, recipe.seed), recipe.rollout, seed=recipe.seed
    )
    return Run(
        config=recipe,
        tokenizer=tokenizer_of(recipe),
        taskset=WorkloadTasks(arm, arm.untimed - (recipe.cluster.max_staleness if arm.verb == "step" else 0)),
        conversations=None,
        rewards=cast("Any", RandomRewards(recipe.seed)),
        algorithm=build_algorithm(recipe.algorithm),
        workers=workers,
        method=_method_of(arm, workers),
        console=Console("quiet", recipe.steps),
        collection=replace(
            collection,
            sampling=replace(collection.sampling, ignore_eos=True),
            context_length=recipe.model.context_length,
            answer_limits=lambda task: task.metadata[LIMITS],
        ),
        lengths=ExpectedLengths(),
    )


def _method_of(arm: Arm, workers: Workers) -> StepMethod:
    if arm.verb == "rollout":
        return GenerateOnly()
    return LearnOnly(arm) if arm.verb == "train" else method_of(arm.recipe, workers)


def published_bytes(run: Run) -> int:
    """Bytes of codes and scales that a publish of the embedded worker renews; 0 on several workers."""
    worker = run.workers.worker
    return code_bytes(worker.engine_model) if isinstance(worker, Worker) else 0


def completions_of(result: StepResult) -> Sequence[object]:
    """What identifies the sampled answers of a step: their tokens and log-probs."""
    return [
        (turn.completion.token_ids, turn.completion.logprobs)
        for group in result.groups
        for rollout in group.rollouts
        for turn in rollout.turns
    ]
