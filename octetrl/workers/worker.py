"""A worker: trainer and engine of one GPU or CPU process, and the quantised weights that they share.

    generate   completions sampled with the published weights
    session    the same, with requests that arrive while others run
    train      one update of the trainer's weights; its forward collects the amax of K and V
    publish    codes and KV scales into the engine, read back and compared
    calibrate  KV scales before the first rollout, from its prompts
    save       in two parts: copy_state stops the run, write_state does not
    load

workers/models.py builds the models, all with one `PrecisionPolicy`.

**Own engine.** What this project's engine offers beyond `RolloutBackend` (rollout/backend.py): its KV scales, all
metrics, drafts.

The doctor compares it op by op with the trainer, and `bench step` reads its capacity. They work with this engine alone;
everything else goes through the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.engine import Engine
from octetrl.engine.weights import weight_set
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax
from octetrl.fp8.parity import Parity, parity_of
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnCompletions,
    OnProgress,
    PackedBatch,
    PolicyUpdate,
    Published,
    joined,
)
from octetrl.rollout.backend import (
    BackendSession,
    OnSession,
    RemembersAnswers,
    RolloutBackend,
    SessionRecord,
    not_asked,
)
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.telemetry.mismatch import mismatch_of
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.context_parallel import ContextTrainer
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.state_writer import Content
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import Sums, held_out_sums, observe_kv
from octetrl.workers.build_engine import build_engine, with_own_engine
from octetrl.workers.checkpoint_state import SavedWorker, load_state, saved_earlier_scales, saved_scales, state_files
from octetrl.workers.clock import Clock
from octetrl.workers.kernel_paths import path_metrics
from octetrl.workers.models import LoadWeights, ModelBuilder


class Worker(SavedWorker):
    """Built once. `load_weights` fills the trainer's model (and the reference's); the engine's shares its tensors.

    `trains` false makes no optimizer state: for evaluation and generation. `draws` false: others generate, and our
    engine only reads back what is published. `peers`: the other workers of the run, with which it trains one model; all
    call `train`, `calibrate` and `load` together. `loaders`: those that load together.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        spec: ModelSpec,
        policy: PrecisionPolicy,
        tokenizer: Tokenizer,
        algorithm: Algorithm,
        load_weights: LoadWeights,
        device: torch.device,
        trains: bool = True,
        draws: bool = True,
        peers: Peers = ALONE,
        loaders: Peers | None = None,
    ) -> None:
        self.recipe, self.spec, self.policy, self.device, self.clock = recipe, spec, policy, device, Clock(device)
        generating = recipe if draws else with_own_engine(recipe)
        models = ModelBuilder(generating, spec, policy, device, load_weights, loaders or peers, trains)
        self.peers, self.loaded = peers, models.count
        self.trainer_model = models.trainer_model()
        self.engine_model = models.engine_model(self.trainer_model)
        shares = recipe.cluster.context_parallel != "off" and peers.share.count > 1
        self.trainer = (ContextTrainer if shares else Trainer)(
            self.trainer_model,
            config=recipe.trainer,
            algorithm=algorithm,
            temperature=recipe.training_temperature,
            total_steps=recipe.steps,
            reference=models.reference(algorithm, self.trainer_model, tokenizer),
            critic=models.critic() if algorithm.needs_values and trains else None,
            collect_kv_amax=policy.kv_mode == "calibrated" and recipe.fp8.calibration == "fused",
            seed=recipe.seed,
            trains=trains,
            peers=peers,
        )
        self.engine: RolloutBackend = build_engine(
            generating,
            self.engine_model,
            policy=policy,
            tokenizer=tokenizer,
            device=device,
            trains=trains,
            peers=loaders or peers,
        )
        self.kv_scales: KVScales | None = None
        self.earlier_scales: dict[int, KVScales] = {}  # by policy version, where batches are drawn ahead
        super().__init__(self.trainer, self._state_files, device)
        self._put_into_engine(self.trainer.policy_version)

    @property
    def layout(self) -> PackingLayout:
        """How `pack` should pack for this worker. Batches of a checkpoint may be of a run with weights in flight."""
        is_ahead = self.recipe.cluster.max_staleness > 0
        return replace(self.trainer.layout, by_version=is_ahead and self.policy.kv_mode == "calibrated")

    @property
    def needs_calibration(self) -> bool:
        """Whether the engine would refuse to write its cache: FP8, calibrated, and no scales yet."""
        return self.policy.kv_mode == "calibrated" and self.kv_scales is None

    # ------------------------------------------------------------ the verbs of a step

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests."""
        with self.clock("rollout") as took:
            drawn = self.engine.generate(requests, on_progress, on_completions)
        on_end(self._record(took))
        return drawn

    @contextmanager
    def session(self, on_progress: OnProgress | None = None, on_end: OnSession = not_asked) -> Iterator[BackendSession]:
        """An open session: requests may arrive while others run."""
        with self.clock("rollout") as took, self.engine.session(on_progress) as session:
            yield session
        on_end(self._record(took))

    def _record(self, took: Mapping[str, float]) -> SessionRecord:
        return SessionRecord(took, self.engine.metrics, self.policy.kv_mode == "calibrated")

    def forget_prefixes(self) -> None:
        """The next `generate` prefills every prompt, whatever was generated before."""
        self.engine.forget_prefixes()

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        """Gives answers of earlier steps to the engine, for its drafts. Another backend makes none from them."""
        if isinstance(self.engine, RemembersAnswers):
            self.engine.remember(answers)

    def train(self, batch: PackedBatch, by: Callable[..., PolicyUpdate] | None = None) -> PolicyUpdate:
        """One update from `batch`, with the KV cache of its samples; the metrics contain the mismatch.

        With several workers `batch` has this worker's micro-batches, and the whole batch's denominators. The metrics
        are those of all workers. `by` is used in place of `Trainer.train` (hosted.py).
        """
        self.free_cache()
        on_policy = batch.policy_version == self.trainer.policy_version
        with self.clock("train") as took:
            update = (by or self.trainer.train)(batch, self.replay(batch.policy_version), self.policy.digest)
        calibrated: Mapping[str, float] = {}
        if self.policy.kv_mode == "calibrated" and batch.minibatches:
            with self.clock("calibrate") as calibrated:
                amax_LS = update.kv_amax_LS
                if self.recipe.fp8.calibration == "exact":
                    amax_LS = observe_kv(self.trainer, batch)  # one more forward, with the new weights
                self._take_scales(amax_LS)
        is_promised = on_policy and self.parity == "promised"
        mismatch = mismatch_of(update.logprobs, update.policy_version - 1, equality_is_promised=is_promised)
        exchanged = self.trainer.weights.take_exchange()
        return PolicyUpdate(update.policy_version, joined(update.metrics, mismatch, took, calibrated, exchanged))

    def measure_held_out(self, batch: PackedBatch) -> list[Sums]:
        """The losses of examples that are not learnt from (trainer/without_update.py)."""
        self.free_cache()
        return held_out_sums(self.trainer, batch, self.replay(batch.policy_version))

    def free_cache(self) -> None:
        """The memory of the KV cache for training; the next rollout allocates it again."""
        if self.device.type == "cuda" and self.recipe.engine.release_for_training:
            self.engine.sleep()

    def publish(self, policy_version: int) -> Published:
        """The trainer's weights and scales become the engine's; what the engine then holds is compared."""
        with self.clock("publish") as took:
            digest = self._put_into_engine(policy_version)
        draws = self.recipe.algorithm.learns_from == "rollouts" and self.recipe.engine.backend == "octetrl"
        paths = path_metrics(trained=self.trainer_model, generating=self.engine_model if draws else None)
        return Published(policy_version, digest, {"publish/policy_version": float(policy_version), **took, **paths})

    # ------------------------------------------------------------ saving and loading

    def _state_files(self) -> dict[str, Content]:
        base = self.recipe.model.path
        return state_files(self.trainer, self.trainer_model, base, self.kv_scales, self.earlier_scales)

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        """Put a verified checkpoint back, weights, optimizer and scales, and publish it."""
        load_state(self.trainer, saved, policy_version)
        scales = saved_scales(saved, self.spec, self.device, self.peers.group)
        if scales is not None:
            self.kv_scales = scales
        self.earlier_scales = saved_earlier_scales(saved, self.spec, self.device)
        self._put_into_engine(policy_version)

    # ------------------------------------------------------------ calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> dict[str, float]:
        """KV scales from one forward over these sequences: before the first rollout, with its prompts. Returns what it
        took."""
        with self.clock("calibrate") as took:
            self._take_scales(observe_kv(self.trainer, token_lists))
            self._put_into_engine(self.trainer.policy_version)
        return took

    def _take_scales(self, amax_LS: Tensor | None) -> None:
        assert amax_LS is not None, "KV calibration: no forward has observed K and V"
        self.kv_scales = kv_scales_from_amax(
            amax_LS,
            self.spec,
            margin=self.recipe.fp8.calibration_margin,
            policy_version=self.trainer.policy_version,
        )

    def replay(self, drawn_with: int | None = None) -> KVReplay:
        if not self.recipe.fp8.kv_replay or self.policy.kv_mode == "none":
            return KVReplay()
        if self.kv_scales is None:
            return KVReplay(self.policy.kv_mode)
        earlier = {version: scales.scale_LS for version, scales in self.earlier_scales.items()}
        return KVReplay(self.policy.kv_mode, earlier.get(drawn_with or 0, self.kv_scales.scale_LS), earlier)

    # ------------------------------------------------------------ publishing and measuring

    def _put_into_engine(self, policy_version: int) -> str:
        """The digest of what the engine then holds."""
        self.engine.put_weights(weight_set(self.trainer_model, policy_version, self.kv_scales))
        return self.engine.weights_digest(covers_all=self.recipe.cluster.num_workers > 1)

    @property
    def parity(self) -> Parity:
        """Whether the trainer's log-probs of samples drawn with its weights are the engine's to the bit."""
        gpu = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        return parity_of(self.recipe, self.policy, on_gpu=gpu is not None, capability=gpu)


def own_engine(worker: Worker) -> Engine:
    """The engine of a worker. UserError if it has another backend."""
    if not isinstance(worker.engine, Engine):
        raise UserError(
            f"this worker generates with {type(worker.engine).__name__}, and the doctor and `bench step` look into"
            " OctetRL's own engine; run them without another backend"
        )
    return worker.engine
