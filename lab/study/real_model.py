"""What FP8 does to a pretrained model: its linears and its KV cache, whole, by layer and by head, and both sides' bits.

    python -m lab.study.real_model --model models/SmolLM2-135M-Instruct [--tokens 128] [--texts code,sums]
    python -m lab.study.real_model --model ... --only bits [--bits bf16,fp8_full]

The first three parts quantise by the package's quantisers inside a forward that is otherwise exact (float64_model.py,
here in float32): the effect of a format alone, without any other rounding. Calibrated scales come from other pieces of
the same kinds of text (texts.py). Rows by `part`:

    whole   linears (weights and activations, each alone), K, V and both, calibrated and by token, linears and cache
    layer   the linears of one layer
    linears the linears in other formats, or some of them exact: what a format of the linears could win back
    blackwell  linears in MXFP8, by both roundings of its scales, and in NVFP4, beside E4M3 in blocks of 32
    head    K or V of one KV head of one layer, calibrated. error, error_by_token: relative errors of the head's values
            with either kind of scale; below_normal: share of values whose code is below E4M3's smallest normal number;
            first_amax, median_amax: largest magnitude of the first token, and its median over tokens, divided by the
            calibration's largest
    bits    engine against trainer, as `octetrl doctor` compares them: largest log-prob difference (decode, chunks and
            cached pages, against the packed training forward), 0.0 if all bits are equal

`kl`, `logprob_change`, `same_choice`: as in kv_formats.py; `perplexity_ratio`: exp(-logprob_change). Writes
`study_real-model.json`, or `study_real-model-PARTS.json` for some parts. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.record import RESULTS, show, write_result
from lab.study import codecs
from lab.study.codecs import Codec, Values
from lab.study.float64_model import PlainModel, Replacement, change_of
from lab.study.kv_formats import Captured, relative
from lab.study.texts import KINDS, read_texts
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.doctor.examine import Examination, ExaminedWorker
from octetrl.doctor.findings import examine
from octetrl.fp8.quantize import (
    BLOCK,
    dequantize_activation,
    dequantize_weight,
    quantize_activation_reference,
    quantize_weight_reference,
)

Row = dict[str, object]
PARTS = ("whole", "layer", "linears", "blackwell", "head", "bits")
BITS = ("bf16", "fp8", "fp8_full", "fp8_full_dynamic")
RECIPE = "grpo_chain-sum_smollm2-135m_1gpu_fp8-full"
Fitted = tuple[Values, Values]


class Linears:
    """FP8 linears: the values of a weight's codes are computed once."""

    def __init__(self, weights: bool, activations: bool, only: str = "") -> None:
        self.weights, self.activations, self.only = weights, activations, only
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, x_TI: Tensor, w_OI: Tensor) -> Tensor:
        if name.startswith(self.only):
            if self.weights:
                if name not in self.kept:
                    self.kept[name] = dequantize_weight(quantize_weight_reference(w_OI))
                w_OI = self.kept[name].to(x_TI.dtype)
            if self.activations:
                x_TI = dequantize_activation(quantize_activation_reference(x_TI)).to(x_TI.dtype)
        return x_TI @ w_OI.t()


@dataclass(frozen=True)
class OtherLinears:
    """Linears with a scale for 1 x `block` activations and `block` x `block` weights; a block of 0 is a whole row.
    Those with a word of `exact` in their name stay exact. `values`: another format of both operands."""

    block: int = BLOCK
    integers: bool = False
    exact: tuple[str, ...] = ()
    values: Values | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, x_TI: Tensor, w_OI: Tensor) -> Tensor:
        if any(word in f"{name}." for word in self.exact):
            return x_TI @ w_OI.t()
        columns = self.block or x_TI.shape[1]
        if name not in self.kept:
            self.kept[name] = self._stored(w_OI, self.block or 1, columns)
        return self._stored(x_TI, 1, columns) @ self.kept[name].t()

    def _stored(self, x: Tensor, rows: int, columns: int) -> Tensor:
        return codecs.in_blocks(x, rows, columns, self.integers) if self.values is None else self.values(x)


class Measurement:
    """The model, the texts' exact log-probs and streams, and the values that calibrate."""

    def __init__(self, folder: str, tokens: int, kinds: tuple[str, ...]) -> None:
        self.model = PlainModel(folder, torch.float32)
        texts = read_texts(folder, tokens, kinds)
        self.calibration = [Captured.of(self.model, text.calibration_T)[0] for text in texts]
        self.texts = [text.measured_T for text in texts]
        self.operands = [Captured.of(self.model, ids_T)[0] for ids_T in self.texts]
        self.streams = [self.model.layers(self.model.embed(ids_T)) for ids_T in self.texts]
        self.exact = [self.model.logprobs(stream[-1]) for stream in self.streams]
        self.workload = f"{len(texts)}x{tokens}"

    @property
    def num_layers(self) -> int:
        return self.model.spec.num_layers

    def fitted(self, codec: Codec) -> list[Fitted]:
        """The codec's functions for K and V of each layer."""
        return [
            (codec([text.k[layer] for text in self.calibration]), codec([text.v[layer] for text in self.calibration]))
            for layer in range(self.num_layers)
        ]

    def effect(self, replacement: Replacement, first: int = 0) -> Row:
        """The change of all texts' log-probs if layers from `first` on compute with the replacement."""
        found = [self.model.logprobs(self.model.layers(one[first], replacement, first)[-1]) for one in self.streams]
        row = change_of(zip(self.texts, self.exact, found, strict=True))
        return row | {"perplexity_ratio": math.exp(-float(str(row["logprob_change"])))}


def cached(layers: Sequence[Fitted], *, k: bool = True, v: bool = True) -> Callable[..., tuple[Tensor, Tensor]]:
    def read(layer: int, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        k_values, v_values = layers[layer]
        return (k_values(k_TKD) if k else k_TKD), (v_values(v_TKD) if v else v_TKD)

    return read


def whole(measured: Measurement) -> Iterator[Row]:
    calibrated, by_token = measured.fitted(codecs.e4m3_head()), measured.fitted(codecs.e4m3_token)
    linears = Linears(True, True)
    yield {"format": "exact"} | measured.effect(Replacement())
    yield {"format": "linears"} | measured.effect(Replacement(linear=linears))
    yield {"format": "linears, weights"} | measured.effect(Replacement(linear=Linears(True, False)))
    yield {"format": "linears, activations"} | measured.effect(Replacement(linear=Linears(False, True)))
    for name, layers in (("calibrated", calibrated), ("by token", by_token)):
        yield {"format": f"K and V {name}"} | measured.effect(Replacement(cached=cached(layers)))
        yield {"format": f"K {name}"} | measured.effect(Replacement(cached=cached(layers, v=False)))
        yield {"format": f"V {name}"} | measured.effect(Replacement(cached=cached(layers, k=False)))
        both = Replacement(linear=linears, cached=cached(layers))
        yield {"format": f"linears, K and V {name}"} | measured.effect(both)


def linear_formats(num_layers: int) -> dict[str, OtherLinears]:
    """Blocks of other sizes, 8-bit integers, and linears that stay exact."""
    found = {f"E4M3, blocks of {size}": OtherLinears(size) for size in (128, 64, 32, 16)}
    found["E4M3, a scale a row"] = OtherLinears(0)
    found |= {f"int8, blocks of {size}": OtherLinears(size, integers=True) for size in (128, 32)}
    found["int8, a scale a row"] = OtherLinears(0, integers=True)
    kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    found |= {f"E4M3, exact {kind}": OtherLinears(exact=(kind,)) for kind in kinds}
    last, eighth = num_layers - 1, max(1, round(num_layers / 8))
    ends = {
        "last layer": [last],
        "first and last layer": [0, last],
        "last eighth of the layers": range(num_layers - eighth, num_layers),
    }
    named = {name: tuple(f"layers.{layer}." for layer in layers) for name, layers in ends.items()}
    return found | {f"E4M3, exact {name}": OtherLinears(exact=words) for name, words in named.items()}


def blackwell_formats() -> dict[str, OtherLinears]:
    return {
        "E4M3, blocks of 32": OtherLinears(32),
        "MXFP8": OtherLinears(values=codecs.mxfp8),
        "MXFP8, OCP's rounding": OtherLinears(values=partial(codecs.mxfp8, rounding="ocp")),
        "NVFP4": OtherLinears(values=codecs.nvfp4),
    }


def by_format(measured: Measurement, formats: Mapping[str, OtherLinears]) -> Iterator[Row]:
    for name, linears in formats.items():
        yield {"format": name} | measured.effect(Replacement(linear=linears))
        linears.kept.clear()


def by_layer(measured: Measurement) -> Iterator[Row]:
    for layer in range(measured.num_layers):
        replacement = Replacement(linear=Linears(True, True, f"layers.{layer}."))
        yield {"format": "linears", "layer": layer} | measured.effect(replacement, layer)


def by_head(measured: Measurement) -> Iterator[Row]:
    calibrated, by_token = measured.fitted(codecs.e4m3_head()), measured.fitted(codecs.e4m3_token)
    for layer in range(measured.num_layers):
        for name, place in (("K", 0), ("V", 1)):
            for head in range(measured.model.spec.num_kv_heads):
                one = _one_head(calibrated[layer][place], layer, place, head)
                row: Row = {"format": f"{name} calibrated", "layer": layer, "head": head}
                texts = [(text.k, text.v)[place][layer] for text in measured.operands]
                calibration = [(text.k, text.v)[place][layer][:, [head]] for text in measured.calibration]
                row |= head_values([x[:, [head]] for x in texts], calibration)
                for measure, values in (("error", calibrated), ("error_by_token", by_token)):
                    errors = [relative(values[layer][place](x)[:, head], x[:, head]) for x in texts]
                    row[measure] = sum(errors) / len(errors)
                yield row | measured.effect(Replacement(cached=one), layer)


def _one_head(values: Values, of_layer: int, place: int, head: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def read(layer: int, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        if layer != of_layer:
            return k_TKD, v_TKD
        both = [k_TKD, v_TKD]
        changed = both[place].clone()
        changed[:, head] = values(both[place])[:, head]
        both[place] = changed
        return both[0], both[1]

    return read


def head_values(texts: Sequence[Tensor], calibration: Sequence[Tensor]) -> Row:
    """Magnitudes of one head's values, each text [T, 1, D]."""
    scale_K = codecs.head_scales(calibration)
    largest = max(float(x.abs().max()) for x in calibration)
    amax = [x.abs().amax((1, 2)) for x in texts]
    count = len(texts)
    return {
        "below_normal": sum(float(codecs.below_normal(x, scale_K).float().mean()) for x in texts) / count,
        "first_amax": sum(float(amax_T[0]) for amax_T in amax) / count / largest,
        "median_amax": sum(float(amax_T.median()) for amax_T in amax) / count / largest,
    }


def bits(folder: str, precisions: Sequence[str], examination: Examination) -> Iterator[Row]:
    """The doctor's comparison; largest difference over all ways in which engine and trainer computed a log-prob."""
    for name in precisions:
        precision, dynamic = name.removesuffix("_dynamic"), name.endswith("_dynamic")
        changes = [
            f"model.path={folder}",
            f"precision={precision}",
            "cluster.device=cpu",
            "engine.kv_cache_tokens=4096",
        ]
        recipe = load_recipe(shipped_path(RECIPE), [*changes, *(["fp8.kv_cache=dynamic"] if dynamic else [])])
        report = examine(ExaminedWorker(recipe, examination)).report
        differences = [0.0 if one is None else one.max_abs for _, one in report.ends]
        yield {
            "format": name,
            "max_abs_diff": max(differences),
            "compared": report.num_drawn,
            "op_tokens": report.num_tokens,
            "equal": report.equal,
            "ways": len(report.ends) + len(report.passes),
        }


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a dense model")
    parser.add_argument("--tokens", type=int, default=128, help="of each piece of text")
    parser.add_argument("--texts", default="code,sums", help=f"which kinds, of {', '.join(KINDS)}")
    parser.add_argument("--only", default=",".join(PARTS), help="which parts")
    parser.add_argument("--bits", default=",".join(BITS), help="precisions of the part `bits`")
    parser.add_argument("--prompts", type=int, default=2, help="of the part `bits`")
    parser.add_argument("--answer-tokens", type=int, default=16, help="of the part `bits`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    parts = arguments.only.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is no part; give some of {', '.join(PARTS)}")
    rows: list[Row] = []
    made: dict[str, Iterator[Row]] = {}
    workload = f"{arguments.prompts}x2x{arguments.answer_tokens}"
    if parts != ["bits"]:
        measured = Measurement(arguments.model, arguments.tokens, tuple(arguments.texts.split(",")))
        made = {"whole": whole(measured), "layer": by_layer(measured)}
        made |= {"blackwell": by_format(measured, blackwell_formats())}
        made |= {"linears": by_format(measured, linear_formats(measured.num_layers)), "head": by_head(measured)}
        text_workload = measured.workload
    for part in parts:
        began, before = time.perf_counter(), len(rows)
        if part == "bits":
            with torch.enable_grad():
                examined = bits(
                    arguments.model,
                    arguments.bits.split(","),
                    Examination(arguments.prompts, 2, arguments.answer_tokens),
                )
                rows += [{"precision": row["format"], "workload": workload, "part": part} | row for row in examined]
        else:
            rows += [{"precision": "float32", "workload": text_workload, "part": part} | row for row in made[part]]
        show(rows[before:], f"{part}, {time.perf_counter() - began:.0f} s")
    name = "real-model" if len(parts) == len(PARTS) else f"real-model-{'-'.join(parts)}"
    print(f"wrote {write_result('study', name, rows, arguments.out)}")


if __name__ == "__main__":
    main()
