"""Builds what one worker holds from the recipe, in this process or in one of many.

Nothing else is needed: shape, precision, tokenizer, objective and weights follow from the recipe and the files that it
names. A worker on another machine therefore receives the recipe alone, and must see those files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import ClusterConfig, Recipe
from octetrl.data.tokenizer import Tokenizer, recipe_tokenizer
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.hf_weights import load_weights
from octetrl.models.peft_adapters import begin_adapters
from octetrl.models.random_weights import draw_weights
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.system.errors import UserError
from octetrl.system.host import num_cores
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.model_shape import model_spec
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.scalar_models import RewardModelScorer, build_reward_model
from octetrl.workers.worker import Worker

Role = Literal["both", "trains", "generates"]  # of a worker in a run; other workers do the rest


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a built worker says of itself."""

    layout: PackingLayout
    policy_version: int
    needs_calibration: bool
    weights_are_whole: bool
    loaded: LoadCount = field(default_factory=LoadCount)  # when it was built
    link_gb_per_second: float = 0.0  # at which it receives weights from the others, measured before; 0 if it is alone


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """What one worker holds: the model that is trained, and the reward model that scores, if the recipe names one."""

    worker: Worker | RewardModelWorker
    scorer: RewardModelScorer | None = None
    loaded: LoadCount = field(default_factory=LoadCount)  # what building `worker` has read and quantised

    def state(self, link_gb_per_second: float = 0.0) -> WorkerState:
        worker = self.worker
        needs_calibration = isinstance(worker, Worker) and worker.needs_calibration
        whole = worker.weights_are_whole
        return WorkerState(
            worker.layout, worker.policy_version, needs_calibration, whole, self.loaded, link_gb_per_second
        )

    def verb(self, name: str) -> Callable[..., Any]:
        """What a team calls by this name."""
        if name == "score":
            assert self.scorer is not None, "the recipe has no environment.reward_model"
            return self.scorer.score
        method: Callable[..., Any] = self.state if name in ("build", "state") else getattr(self.worker, name)
        return method


def resolve_device(cluster: ClusterConfig) -> torch.device:
    """The device of a run in this process; `auto` is the GPU if there is one. Raises UserError if CUDA is requested and
    absent."""
    available = torch.cuda.is_available()
    if cluster.device == "cuda" and not available:
        raise UserError(
            "device: 'cuda' was requested, but this machine has no usable GPU; use the CPU, where FP8 is emulated"
            " (cluster.device=cpu in a recipe, else --device cpu), or install a CUDA build of torch"
        )
    torch.set_num_threads(cluster.cpu_threads or min(torch.get_num_threads(), num_cores()))
    return torch.device("cuda" if available and cluster.device != "cpu" and not cluster.on_cpus else "cpu")


def build_worker(
    recipe: Recipe,
    device: torch.device,
    *,
    tokenizer: Tokenizer | None = None,
    trains: bool = True,
    role: Role = "both",
    peers: Peers = ALONE,
    loaders: Peers | None = None,
) -> BuiltWorker:
    """A worker with its weights. `tokenizer`: the recipe's, where it is loaded already. `peers`: the other workers of
    the run, with which it trains. `loaders`: those with which it only loads the model; `peers` by default.
    Raises UserError."""
    algorithm = build_algorithm(recipe.algorithm)
    if algorithm.reward_loss is not None:
        count = LoadCount()
        tokenizer = tokenizer or recipe_tokenizer(recipe)
        model = build_reward_model(recipe, device, peers, count, pad_token_id=tokenizer.pad_token_id)
        return BuiltWorker(RewardModelWorker(recipe, model, algorithm, peers=peers), loaded=count)
    spec = model_spec(recipe)
    if role == "generates":
        algorithm = replace(algorithm, needs_reference=False, needs_teacher=False)
    scorer = (
        RewardModelScorer(recipe, device, loaders or peers) if recipe.model_scores and role != "trains" else None
    )  # refused before the policy loads
    worker = Worker(
        recipe,
        spec=spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        policy=precision_policy(spec, recipe.fp8),
        tokenizer=tokenizer or recipe_tokenizer(recipe, spec.vocab_size),
        algorithm=algorithm,
        load_weights=lambda model, loading: fill_weights(model, recipe, loading),
        device=device,
        trains=trains and role != "generates",
        draws=role != "trains",
        peers=peers,
        loaders=loaders,
    )
    if role == "generates":
        keep_codes(worker)
    return BuiltWorker(worker, scorer, worker.loaded)


BuildWorker = Callable[..., BuiltWorker]
"""`build_worker`, or another function with its arguments, for a bench."""


def keep_codes(worker: Worker) -> None:
    """Frees the BF16 copies of FP8 weights, of a worker that only generates: their codes are sent."""
    worker.trainer_model.drop_fp8_weights()
    worker.publish(worker.policy_version)


def fill_weights(model: Decoder, recipe: Recipe, loading: Loading | None = None) -> None:
    """The model from `model.path`, or random from the seed; adapters likewise from `model.lora.path`, or new.

    `loading`: which rows of the model this worker fills, all of them by default."""
    if recipe.model.init == "random":
        draw_weights(model, recipe.seed, model.spec, loading)
        model.requantize()
    else:
        load_weights(model, _folder(recipe), loading=loading)
    begin_adapters(model, recipe.seed)


def _folder(recipe: Recipe) -> Path:
    assert recipe.model.path is not None, "validated: a pretrained model has a path"
    return Path(recipe.model.path)
