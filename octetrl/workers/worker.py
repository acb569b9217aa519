"""What one GPU (or one CPU process) holds: a trainer, an engine, and the quantised weights they share.

    generate   completions drawn with the published weights
    session    the same, with requests that come while others run
    train      one update of the trainer's weights; the amax of K and V comes out of its forward
    publish    codes and KV scales into the engine, read back and compared
    calibrate  KV scales before the first rollout, from its prompts
    save, load

Trainer and engine are built from one `Decoder` class with one `PrecisionPolicy`; this file is where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.engine import Engine
from octetrl.engine.session import OnProgress, Session
from octetrl.engine.weights import share_weights, weight_set
from octetrl.fp8.gemm import BackendName, choose_backend
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax
from octetrl.fp8.parity import why_not_equal
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.models.decoder import Decoder
from octetrl.models.peft_adapters import load_trained, save_trained
from octetrl.records import Completion, GenerationRequest, PackedBatch, PolicyUpdate, Published, TokenLogprobs
from octetrl.telemetry.mismatch import mismatch_metrics
from octetrl.telemetry.spans import Spans
from octetrl.trainer.checkpoint import Checkpoint, write_file
from octetrl.trainer.critic import Critic
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.scalar_trainer import ScalarState
from octetrl.trainer.trainer import KVReplay, Trainer
from octetrl.workers.kernel_paths import path_metrics
from octetrl.workers.scalar_models import build_critic_model
from octetrl.workers.teacher import load_teacher, teacher_fp8

CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"  # in a checkpoint
LoadWeights = Callable[[Decoder], None]


class Worker:
    """Built once. `load_weights` fills the trainer's model (and the reference's); the engine's shares its tensors.

    `trains` false makes no optimizer state: for evaluation and generation.
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
        spans: Spans,
        trains: bool = True,
    ) -> None:
        self.recipe, self.spec, self.policy, self.device, self.spans = recipe, spec, policy, device, spans
        self._dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._backend = _backend(policy, device, recipe.fp8.emulate)
        self.trainer_model = self._loaded_model(load_weights)
        self.engine_model = self._model("rollout", torch.device("meta"))
        share_weights(self.engine_model, self.trainer_model)
        self.trainer = Trainer(
            self.trainer_model,
            config=recipe.trainer,
            algorithm=algorithm,
            temperature=recipe.rollout.temperature or 1.0,
            total_steps=recipe.steps,
            reference=self._reference(algorithm, load_weights, tokenizer),
            critic=self._critic() if algorithm.needs_values and trains else None,
            collect_kv_amax=policy.kv_mode == "calibrated" and recipe.fp8.calibration == "fused",
            seed=recipe.seed,
            trains=trains,
        )
        self.engine = Engine(
            self.engine_model,
            spec=spec,
            policy=policy,
            tokenizer=tokenizer,
            config=recipe.engine,
            context_length=recipe.model.context_length,
            dtype=self._dtype,
            device=device,
        )
        self.kv_scales: KVScales | None = None
        self._put_into_engine(self.trainer.policy_version)

    def _model(self, side: Side, device: torch.device) -> Decoder:
        lora = self.recipe.model.lora
        return Decoder(self.spec, self.policy, side, dtype=self._dtype, device=device, backend=self._backend, lora=lora)

    def _reference(self, algorithm: Algorithm, load_weights: LoadWeights, tokenizer: Tokenizer) -> Decoder | None:
        if algorithm.needs_teacher:
            uses_fp8 = teacher_fp8(self.recipe).train
            backend = choose_backend(self.device, self.recipe.fp8.emulate) if uses_fp8 else self._backend
            return load_teacher(self.recipe, tokenizer, self.device, backend)
        return self._first_policy(load_weights) if algorithm.needs_reference else None

    def _loaded_model(self, load_weights: LoadWeights) -> Decoder:
        model = self._model("train", self.device)
        load_weights(model)
        model.requantize()
        if model.lora is not None:
            model.train_adapters_alone()
        return model

    def _first_policy(self, load_weights: LoadWeights) -> Decoder:
        """The policy the run began with. With LoRA the same frozen weights beside adapters of its own."""
        if self.recipe.model.lora is None:
            return self._loaded_model(load_weights)
        model = self._model("train", torch.device("meta"))
        share_weights(model, self.trainer_model)
        for _, adapter in model.adapters():
            adapter.own_tensors()
        return model

    def _critic(self) -> Critic:
        recipe = self.recipe
        model = build_critic_model(recipe, self.spec, self.device)
        return Critic(model, recipe.critic, recipe.trainer, total_steps=recipe.steps, seed=recipe.seed)

    @property
    def policy_version(self) -> int:
        return self.trainer.policy_version

    @property
    def weights_are_whole(self) -> bool:
        """False while an update changes the weights: such weights must not be saved."""
        return self.trainer.weights_are_whole

    @property
    def layout(self) -> PackingLayout:
        """How `pack` should pack for this worker."""
        return self.trainer.layout

    @property
    def needs_calibration(self) -> bool:
        """Whether the engine would refuse to write its cache: FP8, calibrated, and no scales yet."""
        return self.policy.kv_mode == "calibrated" and self.kv_scales is None

    # ------------------------------------------------------------ the verbs of a step

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None = None
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests."""
        with self.spans("rollout"):
            return self.engine.generate(requests, on_progress)

    @contextmanager
    def session(self, on_progress: OnProgress | None = None) -> Iterator[Session]:
        """An open session: requests may come while others run."""
        with self.spans("rollout"), self.engine.session(on_progress) as session:
            yield session

    def forget_prefixes(self) -> None:
        """The next `generate` prefills every prompt, whatever was generated before."""
        self.engine.forget_prefixes()

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        """One update from `batch`, seen through the cache it was drawn with; mismatch among the metrics."""
        if self.device.type == "cuda" and self.recipe.engine.release_for_training:
            self.engine.sleep()
        on_policy = batch.policy_version == self.trainer.policy_version
        with self.spans("train"):
            update = self.trainer.train(batch, self._replay(), self.policy.digest)
        if self.policy.kv_mode == "calibrated" and batch.minibatches:
            with self.spans("calibrate"):
                amax_2LK = update.kv_amax_2LK
                if self.recipe.fp8.calibration == "exact":
                    amax_2LK = self.trainer.observe_kv(batch)  # one more forward, with the new weights
                self._take_scales(amax_2LK)
        metrics = {**update.metrics, **self._mismatch(update.logprobs, on_policy)}
        return PolicyUpdate(update.policy_version, metrics)

    def publish(self, policy_version: int) -> Published:
        """The trainer's weights and scales become the engine's; what the engine then holds is compared."""
        with self.spans("publish"):
            digest = self._put_into_engine(policy_version)
        return Published(policy_version, digest, {"publish/policy_version": float(policy_version)})

    def rollout_metrics(self) -> dict[str, float]:
        """Of the last `generate` or session, by the names of the step's metrics."""
        return self.engine.rollout_metrics()

    def path_metrics(self) -> dict[str, float]:
        """Which kernels this worker takes; nothing on a CPU."""
        draws = self.recipe.algorithm.learns_from == "rollouts"
        return path_metrics(trained=self.trainer_model, generating=self.engine_model if draws else None)

    def memory_metrics(self) -> dict[str, float]:
        """The device's peak since the last call; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {"memory/peak_gb": peak / 1e9}

    # ------------------------------------------------------------ saving and loading

    def save(self, folder: Path) -> None:
        """Writes the model in Hugging Face form (with LoRA: the adapter in PEFT form) and all that `load` needs."""
        save_trained(self.trainer_model, folder, base=self.recipe.model.path)
        for name, tensors in self._state().items():
            write_file(folder, name, tensors)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint besides the model, by file."""
        files = {"optimizer.safetensors": dict(self.trainer.state().optimizer)}
        reference = self.trainer.reference.state()
        if reference:
            files["reference.safetensors"] = reference
        if self.kv_scales is not None:
            scales = self.kv_scales
            files["kv_scales.safetensors"] = {
                "k_scale": scales.k_scale_LK,
                "v_scale": scales.v_scale_LK,
                "policy_version": torch.tensor(scales.policy_version),
            }
        if self.trainer.critic is not None:
            critic = self.trainer.critic.state()
            files[CRITIC], files[CRITIC_OPTIMIZER] = dict(critic.weights), dict(critic.optimizer)
        return files

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        """Put a verified checkpoint back, weights, optimizer and scales, and publish it."""
        load_trained(self.trainer_model, saved.folder)
        state = self.trainer.state()
        optimizer = saved.tensors("optimizer.safetensors")
        self.trainer.load_state(replace(state, optimizer=optimizer, policy_version=policy_version))
        if "reference.safetensors" in saved.files:
            self.trainer.reference.load_state(saved.tensors("reference.safetensors"))
        if self.trainer.critic is not None:
            self.trainer.critic.load_state(ScalarState(saved.tensors(CRITIC), saved.tensors(CRITIC_OPTIMIZER)))
        if "kv_scales.safetensors" in saved.files:
            scales = saved.tensors("kv_scales.safetensors")
            self.kv_scales = KVScales(
                scales["k_scale"].to(self.device),
                scales["v_scale"].to(self.device),
                policy_version=int(scales["policy_version"]),
            )
        self._put_into_engine(policy_version)

    # ------------------------------------------------------------ calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> None:
        """KV scales from one forward over these sequences: before the first rollout, with its prompts."""
        with self.spans("calibrate"):
            self._take_scales(self.trainer.observe_kv(token_lists))
            self._put_into_engine(self.trainer.policy_version)

    def _take_scales(self, amax_2LK: Tensor | None) -> None:
        assert amax_2LK is not None, "KV calibration: no forward has observed K and V"
        self.kv_scales = kv_scales_from_amax(
            amax_2LK[0],
            amax_2LK[1],
            margin=self.recipe.fp8.calibration_margin,
            policy_version=self.trainer.policy_version,
        )

    def _replay(self) -> KVReplay:
        if not self.recipe.fp8.kv_replay or self.policy.kv_mode == "none":
            return KVReplay()
        if self.kv_scales is None:
            return KVReplay(self.policy.kv_mode)
        return KVReplay(self.policy.kv_mode, self.kv_scales.k_scale_LK, self.kv_scales.v_scale_LK)

    # ------------------------------------------------------------ publishing and measuring

    def _put_into_engine(self, policy_version: int) -> str:
        """The digest of what the engine then holds."""
        self.engine.put_weights(weight_set(self.trainer_model, policy_version, self.kv_scales))
        return self.engine.weights_digest()

    @property
    def promises_parity(self) -> bool:
        """Whether the trainer's log-probs of samples drawn with its weights are the engine's to the bit."""
        return why_not_equal(self.recipe, self.policy, on_gpu=self.device.type == "cuda") is None

    def _mismatch(self, logprobs: TokenLogprobs | None, on_policy: bool) -> dict[str, float]:
        if logprobs is None:
            return {}
        return mismatch_metrics(
            logprobs.generator_N,
            logprobs.trainer_N,
            logprobs.target_positions_N,
            logprobs.sequence_lengths_N,
            equality_is_promised=on_policy and self.promises_parity,
        )


def _backend(policy: PrecisionPolicy, device: torch.device, emulate: bool | None) -> BackendName:
    """Asked of the device only where something is FP8: a BF16 run works on any GPU."""
    if policy.uses_fp8("rollout") or policy.uses_fp8("train"):
        return choose_backend(device, emulate)
    return "emulated"
