"""Measures the error of FP8's gradients by layer and kind of weight: cosine and relative error against a reference.

    python -m lab.gradients [--variants bf16 fp8 fp8_tokens=fp8,wgrad_blocks=tokens] [--out FOLDER]

    float64   a decoder in plain torch and float64, written here, with the same BF16 weights. The table then has BF16
              too, because FP8's error is compared with BF16's.
    bf16      the BF16 trainer's own gradients, for shapes that take too long in float64

One batch of random tokens in sequences of different lengths, random weights, and the mean negative log-prob as the
loss. Forward and backward are the trainer's. `down` of the last layer sees one FP8 GEMM of the backward. `qkv` of the
first layer sees all of them, and the differences of the forward too. `all` is the whole gradient of one kind as one
vector. An untrained model's gradient is a sum of terms that cancel, so its errors are large. Compare FP8's with BF16's.

The limits, for linears, are some 5% above what was measured. Against float64, FP8's error is at most 15.5 times BF16's:
13.0 to 14.9 was measured on a CPU and an H200, and a format with 3 bits of mantissa is 16 times as coarse as one with
7. Against BF16 each workload has its own limit, because errors grow with depth. The exit status is 1 if a limit is not
met. On a CPU there is one small shape, with emulated FP8.

T tokens, E hidden size, H query heads, K kv heads, D head size, N trained tokens.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.record import RESULTS, write_result
from lab.sft_precisions import Variant, parse_variant
from octetrl.config.schema import OptimizerConfig
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.layers.rotary import frequencies
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.activation_checkpoint import layer_runner
from octetrl.trainer.optimizer import Optimizer

RATIO_LIMIT = 15.5  # FP8's error over BF16's, both against float64
BASELINE = "bf16"
LINEARS = ("qkv", "o", "gate_up", "down")
KINDS = (*LINEARS, "norms", "embedding", "lm_head", "norm", "bias")
DEFAULT_VARIANTS = ("bf16", "fp8", "fp8_tokens=fp8,wgrad_blocks=tokens")
Row = dict[str, object]
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A published shape with fewer layers and a smaller vocabulary."""

    preset: str
    layers: int
    tokens: int
    reference: str  # "float64" or "bf16"
    error_limit: float | None = None  # of FP8 against BF16
    vocab_size: int = 32_768

    @property
    def name(self) -> str:
        return f"{self.preset} {self.layers} layers {self.tokens} tokens against {self.reference}"

    @property
    def spec(self) -> ModelSpec:
        spec = spec_from_config(preset_config(self.preset))
        return replace(spec, num_layers=self.layers, vocab_size=min(self.vocab_size, spec.vocab_size))


SMALL = (Workload("tiny", 4, 700, "float64"),)
LARGE = (
    Workload("qwen3-1.7b", 4, 2048, "float64"),
    Workload("qwen3-1.7b", 4, 8192, "bf16", error_limit=0.245),  # measured: 0.232
    Workload("qwen3-8b", 2, 8192, "bf16", error_limit=0.19),  # measured: 0.179
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole sequences end to end; every token but a sequence's first is predicted from the one before."""

    token_ids_T: Tensor
    positions_T: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def random(cls, tokens: int, vocab_size: int, device: torch.device) -> Batch:
        shares = (0.4, 0.25, 0.15, 0.1)  # of the tokens; a fifth sequence takes the rest
        lengths = [int(share * tokens) for share in shares]
        lengths.append(tokens - sum(lengths))
        bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
        generator = torch.Generator().manual_seed(0)
        return cls(
            torch.randint(vocab_size, (tokens,), generator=generator).to(device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            bounds,
        )

    @property
    def predictor_N(self) -> Tensor:
        rows = [torch.arange(start, end - 1) for start, end in pairwise(self.bounds)]
        return torch.cat(rows).to(self.token_ids_T.device)


# ---------------------------------------------------------------- float64, in plain torch


def exact_loss(weights: Mapping[str, Tensor], spec: ModelSpec, batch: Batch) -> Tensor:
    """The mean negative log-prob of the decoder with these weights, in their dtype."""
    hidden_TE = weights["embedding.weight"][batch.token_ids_T]
    position_T = batch.positions_T.double()
    turn_R = frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling).to(position_T)
    angle_TR = torch.outer(position_T, turn_R).to(hidden_TE.dtype)
    for layer in range(spec.num_layers):
        own = {
            name.removeprefix(f"layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed_TE = _norm(hidden_TE, own["attention_norm.weight"], spec)
        hidden_TE = hidden_TE + _attention(normed_TE, own, spec, angle_TR, batch.bounds)
        normed_TE = _norm(hidden_TE, own["mlp_norm.weight"], spec)
        gate_TF, up_TF = (normed_TE @ own["mlp.gate_up_proj.weight"].t()).chunk(2, dim=-1)
        hidden_TE = hidden_TE + (F.silu(gate_TF) * up_TF) @ own["mlp.down_proj.weight"].t()
    hidden_NE = _norm(hidden_TE, weights["norm.weight"], spec)[batch.predictor_N]
    head_VE = weights.get("lm_head.weight", weights["embedding.weight"])
    return F.cross_entropy(hidden_NE @ head_VE.t(), batch.token_ids_T[batch.predictor_N + 1])


def _norm(x: Tensor, weight: Tensor, spec: ModelSpec) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.rms_norm_eps) * weight


def _attention(
    x_TE: Tensor, own: Mapping[str, Tensor], spec: ModelSpec, angle_TR: Tensor, bounds: Sequence[int]
) -> Tensor:
    qkv_TX = x_TE @ own["attention.qkv_proj.weight"].t()
    if "attention.qkv_proj.bias" in own:
        qkv_TX = qkv_TX + own["attention.qkv_proj.bias"]
    qkv_THD = qkv_TX.view(x_TE.shape[0], -1, spec.head_size)
    q_THD, k_TKD, v_TKD = qkv_THD.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if spec.qk_norm:
        q_THD = _norm(q_THD, own["attention.q_norm.weight"], spec)
        k_TKD = _norm(k_TKD, own["attention.k_norm.weight"], spec)
    q_THD, k_TKD = _rotated(q_THD, angle_TR), _rotated(k_TKD, angle_TR)
    groups = spec.num_heads // spec.num_kv_heads
    k_THD, v_THD = (x.repeat_interleave(groups, dim=1) for x in (k_TKD, v_TKD))
    outputs = []
    for start, end in pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_THD, k_THD, v_THD))
        scores = q @ k.transpose(1, 2) * spec.head_size**-0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        outputs.append((scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).flatten(1) @ own["attention.o_proj.weight"].t()


def _rotated(x: Tensor, angle_TR: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle_TR.cos()[:, None], angle_TR.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def exact_gradients(weights: Mapping[str, Tensor], spec: ModelSpec, batch: Batch) -> Gradients:
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    gradients = torch.autograd.grad(exact_loss(leaves, spec, batch), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


# ---------------------------------------------------------------- the trainer's


def build(variant: Variant, spec: ModelSpec, device: torch.device, weights: Mapping[str, Tensor] | None) -> Decoder:
    """The trainer's model with these weights; random ones where there are none."""
    backend = choose_backend(device) if variant.fp8.train else "emulated"
    model = Decoder(spec, precision_policy(spec, variant.fp8), "train", device=device, backend=backend)
    if weights is None:
        model.random_init(0)
        return model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.requantize()
    return model


def trainer_gradients(model: Decoder, batch: Batch) -> Gradients:
    """As the optimizer has them, float32: by the path that the trainer takes on this device."""
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig())
    bounds = torch.tensor(batch.bounds, dtype=torch.int32)
    context = PackedContext(bounds.to(batch.token_ids_T.device), int(bounds.diff().max()))
    hidden_TE = model(batch.token_ids_T, batch.positions_T, context, layer_runner(model, "none"))
    targets_N = batch.token_ids_T[batch.predictor_N + 1]
    logprobs_N, _ = model.logprobs(hidden_TE.index_select(0, batch.predictor_N), targets_N)
    logprobs_N.mean().neg().backward()
    return {slot.name: slot.gradient for slot in optimizer.slots}


# ---------------------------------------------------------------- the distance


@dataclass(frozen=True, slots=True)
class Distance:
    """Sums over one or more tensors, taken as one vector."""

    product: float = 0.0
    ours: float = 0.0
    reference: float = 0.0
    difference: float = 0.0

    @classmethod
    def between(cls, ours: Tensor, reference: Tensor) -> Distance:
        a, b = ours.double().flatten(), reference.double().flatten()
        sums = torch.stack([a @ b, a @ a, b @ b, (a - b).square().sum()])
        return cls(*sums.tolist())

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.product + other.product,
            self.ours + other.ours,
            self.reference + other.reference,
            self.difference + other.difference,
        )

    @property
    def cosine(self) -> float:
        size = math.sqrt(self.ours * self.reference)
        return self.product / size if size else math.nan

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan


def kind_of(name: str) -> tuple[str, str]:
    """("3", "qkv") of "layers.3.attention.qkv_proj.weight"; ("", "embedding") of what belongs to no layer."""
    words = name.split(".")
    if words[0] != "layers":
        return "", words[0]
    if words[-1] == "bias" or words[-2].endswith("norm"):
        return words[1], "norms" if words[-1] != "bias" else "bias"
    return words[1], words[-2].removesuffix("_proj")


def distances(ours: Gradients, reference: Gradients) -> dict[tuple[str, str], Distance]:
    """By layer and kind, with each kind's sum over the layers under "all"."""
    found: dict[tuple[str, str], Distance] = {}
    for name, gradient in ours.items():
        layer, kind = kind_of(name)
        distance = Distance.between(gradient, reference[name])
        for key in ((layer, kind), ("all", kind)) if layer else ((layer, kind),):
            found[key] = found.get(key, Distance()) + distance
    return found


def measure(workload: Workload, variants: Sequence[Variant], device: torch.device) -> Iterator[Row]:
    spec = workload.spec
    batch = Batch.random(workload.tokens, spec.vocab_size, device)
    plain = build(Variant.of(BASELINE, "bf16"), spec, device, None)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    if workload.reference == "float64":
        reference = exact_gradients(weights, spec, batch)
    else:
        reference = trainer_gradients(plain, batch)
        variants = [variant for variant in variants if variant.name != BASELINE]
    for variant in variants:
        gradients = trainer_gradients(build(variant, spec, device, weights), batch)
        for (layer, kind), distance in distances(gradients, reference).items():
            yield {
                "precision": variant.name,
                "workload": workload.name,
                "layer": layer,
                "kind": kind,
                "cosine": distance.cosine,
                "relative_error": distance.relative_error,
            }
        del gradients
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def failures(rows: Sequence[Row]) -> list[str]:
    """The limits that are not met; NaN meets none."""
    error_limits = {workload.name: workload.error_limit for workload in (*SMALL, *LARGE)}
    plain = {(row["workload"], row["layer"], row["kind"]): row for row in rows if row["precision"] == BASELINE}
    found = []
    for row in rows:
        if row["kind"] not in LINEARS or row["precision"] == BASELINE:
            continue
        beside = plain.get((row["workload"], row["layer"], row["kind"]))
        error = float(str(row["relative_error"]))
        limit = error_limits.get(str(row["workload"]))
        if beside is not None:
            limit = RATIO_LIMIT * float(str(beside["relative_error"]))
        if limit is not None and not error <= limit:
            place = f"layer {row['layer']} {row['kind']}"
            found.append(f"{row['precision']}, {row['workload']}: {place} has error {error:.3f}, limit {limit:.3f}")
    return found


def show(rows: Sequence[Row]) -> None:
    """A line a layer and precision: cosine, then relative error."""
    for workload in dict.fromkeys(str(row["workload"]) for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in mine)]
        table = Table("layer", "precision", *kinds, title=f"gradients: {workload}")
        for layer in sorted({str(row["layer"]) for row in mine}, key=lambda one: (not one.isdigit(), one.zfill(4))):
            for precision in dict.fromkeys(str(row["precision"]) for row in mine):
                cells = {
                    row["kind"]: f"{row['cosine']:.5f} {row['relative_error']:.1e}"
                    for row in mine
                    if (row["layer"], row["precision"]) == (layer, precision)
                }
                table.add_row(layer or "no layer", precision, *(cells.get(kind, "") for kind in kinds))
        Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", type=parse_variant, default=[*map(parse_variant, DEFAULT_VARIANTS)])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rows: list[Row] = []
    for workload in (*SMALL, *LARGE) if on_gpu else SMALL:
        rows += measure(workload, arguments.variants, torch.device("cuda" if on_gpu else "cpu"))
        _free()
    show(rows)
    print(f"wrote {write_result('gradients', 'h200' if on_gpu else 'cpu', rows, arguments.out)}")
    failed = failures(rows)
    for line in failed:
        print(f"FAIL {line}")
    print(f"{'FAIL' if failed else 'OK'}: {len(failed)} gradients of linears past their limit")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
