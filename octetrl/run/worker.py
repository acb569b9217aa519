"""What one GPU (or one CPU process) holds: a trainer, an engine, and the quantised weights they share.

    generate -> Completions drawn with the published weights
    train    -> one update of the trainer's weights; KV amax comes out of its forward
    publish  -> codes and KV scales into the engine, read back and compared
    calibrate, save, load

Trainer and engine are built from one `Decoder` class with one `PrecisionPolicy`; this file is where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.engine.engine import Engine
from octetrl.fp8.gemm import choose_backend
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax, same_bits
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, PackedBatch, PolicyUpdate, Published
from octetrl.run.publish import quantize_for_engine, share_weights, verify_weights
from octetrl.run.tokenizer import Tokenizer
from octetrl.telemetry.mismatch import mismatch_metrics
from octetrl.telemetry.spans import Spans
from octetrl.trainer.trainer import KVReplay, Trainer

LoadWeights = Callable[[Decoder], None]


class Worker:
    """Built once; `load_weights` fills the trainer's model (and the reference's), the engine's shares its tensors."""

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
    ) -> None:
        self.recipe, self.spec, self.policy, self.spans = recipe, spec, policy, spans
        backend = choose_backend(device, recipe.fp8.emulate) if policy.uses_fp8("rollout") or policy.uses_fp8("train") else "emulated"
        dtype = getattr(torch, recipe.model.dtype)

        def build(side: str) -> Decoder:
            return Decoder(spec, policy, side, dtype=dtype, device=device, backend=backend)

        self.trainer_model = build("train")
        load_weights(self.trainer_model)
        self.trainer_model.requantize()
        self.engine_model = build("rollout")
        share_weights(self.engine_model, self.trainer_model)
        reference = None
        if algorithm.needs_reference:
            reference = build("train")
            load_weights(reference)
            reference.requantize()
        self.trainer = Trainer(
            self.trainer_model,
            config=recipe.trainer,
            algorithm=algorithm,
            temperature=recipe.rollout.temperature,
            total_steps=recipe.steps,
            reference=reference,
            collect_kv_amax=policy.kv_mode == "calibrated" and recipe.fp8.calibration == "fused",
        )
        self.engine = Engine(
            self.engine_model,
            spec=spec,
            policy=policy,
            tokenizer=tokenizer,
            config=recipe.engine,
            context_length=recipe.model.context_length,
            dtype=dtype,
            device=device,
        )
        self._kv_scales: KVScales | None = None

    def generate(self, requests: Sequence[GenerationRequest], on_progress: Callable | None = None) -> list[list[Completion]]:
        with self.spans("rollout"):
            return self.engine.generate(requests, on_progress)
