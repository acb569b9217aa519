"""Compares formats of the KV cache on K and V of a pretrained model: errors and what they do to its log-probs.

    python -m lab.study.kv_formats --model models/SmolLM2-135M-Instruct [--tokens 320]

The model's own K and V, over texts of five kinds (texts.py), are stored and read back by each format (codecs.py) in all
layers. Calibrated formats see other pieces of the same kinds first. Everything else of the forward is exact (float64
for K, V and attention's error; the log-probs under a format are in float32, whose own error is the row `exact`).

    k_error, v_error     ||x' - x|| / ||x||, x all values of a layer and text; mean over layers and texts
    out_error            the same of attention's output, with exact inputs to each layer; out_error_worst: worst layer
    kl                   mean over tokens of KL(exact || format), nats; kl_error: its standard error over the texts
    logprob_change       mean over tokens of log-prob(format) - log-prob(exact) of the text's own next token
    same_choice          share of tokens whose most likely next token is the same
    bytes                of a KV head's K and V of one token, with scales of tokens (first tokens in BF16 not counted)

Writes `study_kv-formats.json`. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lab.record import RESULTS, show, write_result
from lab.study import codecs
from lab.study.codecs import Codec, Values
from lab.study.float64_model import PlainModel, Replacement, attend, change_of
from lab.study.texts import KINDS, Text, read_texts

Row = dict[str, object]
SCALE_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Format:
    """How K and V are stored, and how many scales of a token K and V of a head have together."""

    k: Codec
    v: Codec
    token_scales: int = 0
    bits: int = 8  # of a value, K and V averaged


def formats() -> dict[str, Format]:
    """All formats by name. `A/B`: K by A, V by B."""
    head, token, exact = codecs.e4m3_head(), codecs.e4m3_token, codecs.bf16
    int8, channel = codecs.int8_token(), codecs.int8_channel()
    both = {
        "e4m3 calibrated": (head, 0),
        "e4m3 calibrated, margin 1": (codecs.e4m3_head(1.0), 0),
        "e4m3 calibrated, margin 2": (codecs.e4m3_head(2.0), 0),
        "e4m3 calibrated, margin 8": (codecs.e4m3_head(8.0), 0),
        "e4m3 calibrated, groups of 16": (codecs.e4m3_group(16), 0),
        "e4m3 calibrated, by channel": (codecs.e4m3_group(1), 0),
        "e4m3 calibrated, first 4 BF16": (codecs.first_exact(head, 4), 0),
        "e4m3 calibrated, centred": (codecs.centred(head), 0),
        "e4m3 calibrated, by channel, centred": (codecs.centred(codecs.e4m3_group(1)), 0),
        "e4m3 by token": (token, 2),
        "e4m3 by token, centred": (codecs.centred(token), 2),
        "e4m3 by token, first 4 BF16": (codecs.first_exact(token, 4), 2),
        "int8 calibrated": (codecs.int8_head(), 0),
        "int8 calibrated, by channel": (channel, 0),
        "int8 calibrated, by channel, centred": (codecs.centred(channel), 0),
        "int8 calibrated, by channel, first 4 BF16": (codecs.first_exact(channel, 4), 0),
        "int8 by token": (int8, 2),
        "int8 by token, centred": (codecs.centred(int8), 2),
        "int8 by token, groups of 32": (codecs.int8_token(32), 4),
    }
    apart = {
        "e4m3 calibrated/bf16": Format(head, exact, bits=12),
        "bf16/e4m3 calibrated": Format(exact, head, bits=12),
        "e4m3 by token/bf16": Format(token, exact, 1, bits=12),
        "bf16/e4m3 by token": Format(exact, token, 1, bits=12),
        "int8 by token/bf16": Format(int8, exact, 1, bits=12),
        "bf16/int8 by token": Format(exact, int8, 1, bits=12),
        "e4m3 calibrated/e4m3 by token": Format(head, token, 1),
        "e4m3 calibrated/int8 by token": Format(head, int8, 1),
        "int8 by channel/int8 by token": Format(channel, int8, 1),
        "int8 by channel, centred/int8 by token": Format(codecs.centred(channel), int8, 1),
        "int8 by token, centred/int8 by token": Format(codecs.centred(int8), int8, 2),
    }
    return (
        {"bf16": Format(exact, exact, bits=16)}
        | {name: Format(codec, codec, scales) for name, (codec, scales) in both.items()}
        | apart
    )


@dataclass(frozen=True, slots=True)
class Captured:
    """Attention's exact operands of one text, by layer, float64."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def of(cls, model: PlainModel, ids_T: Tensor) -> tuple[Captured, Tensor]:
        """The operands, and the log-probs [T, V]."""
        captured = cls([], [], [])

        def keep(_layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
            captured.q.append(q_THD)
            captured.k.append(k_TKD)
            captured.v.append(v_TKD)

        return captured, model(ids_T, Replacement(seen=keep))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one text is compared with."""

    ids_T: Tensor
    operands: Captured
    out: list[Tensor]  # attention's exact output, by layer
    logprobs_TV: Tensor


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


def prepare(model: PlainModel, texts: Sequence[Text]) -> tuple[list[Captured], list[Measured]]:
    """The calibration's K and V, and each measured text's exact values."""
    calibration = [Captured.of(model, text.calibration_T)[0] for text in texts]
    measured = []
    for text in texts:
        operands, logprobs_TV = Captured.of(model, text.measured_T)
        out = [attend(*one) for one in zip(operands.q, operands.k, operands.v, strict=True)]
        measured.append(Measured(text.measured_T, operands, out, logprobs_TV))
    return calibration, measured


def fitted(form: Format, calibration: Sequence[Captured]) -> list[tuple[Values, Values]]:
    """The format's functions for K and V of each layer."""
    return [
        (form.k([text.k[layer] for text in calibration]), form.v([text.v[layer] for text in calibration]))
        for layer in range(len(calibration[0].k))
    ]


def errors(layers: Sequence[tuple[Values, Values]], measured: Sequence[Measured]) -> Row:
    """Errors of K, V and attention's output, with exact inputs to each layer."""
    of_k: list[float] = []
    of_v: list[float] = []
    of_out: list[float] = []
    for k_values, v_values in layers:
        number = len(of_k)
        k_errors, v_errors, out_errors = [], [], []
        for one in measured:
            q_THD, k_TKD, v_TKD = (each[number] for each in (one.operands.q, one.operands.k, one.operands.v))
            k_read, v_read = k_values(k_TKD), v_values(v_TKD)
            k_errors.append(relative(k_read, k_TKD))
            v_errors.append(relative(v_read, v_TKD))
            out_errors.append(relative(attend(q_THD, k_read, v_read), one.out[number]))
        of_k.append(statistics.fmean(k_errors))
        of_v.append(statistics.fmean(v_errors))
        of_out.append(statistics.fmean(out_errors))
    return {
        "k_error": statistics.fmean(of_k),
        "v_error": statistics.fmean(of_v),
        "out_error": statistics.fmean(of_out),
        "out_error_worst": max(of_out),
    }


def end_to_end(model: PlainModel, replacement: Replacement, measured: Sequence[Measured]) -> Row:
    """How the log-probs of all texts change under a replacement."""
    return change_of((one.ids_T, one.logprobs_TV, model(one.ids_T, replacement)) for one in measured)


def replaced(layers: Sequence[tuple[Values, Values]]) -> Replacement:
    """K and V of every layer as the format reads them back."""

    def cached(layer: int, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        k_values, v_values = layers[layer]
        return k_values(k_TKD), v_values(v_TKD)

    return Replacement(cached=cached)


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder of a dense model")
    parser.add_argument("--tokens", type=int, default=320, help="of each piece of text")
    parser.add_argument("--texts", default=",".join(KINDS), help="which kinds")
    parser.add_argument("--formats", help="a part of the names, to try some")
    parser.add_argument("--name", default="kv-formats", help="the JSON is study_NAME.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    texts = read_texts(arguments.model, arguments.tokens, tuple(arguments.texts.split(",")))
    calibration, measured = prepare(PlainModel(arguments.model), texts)
    model = PlainModel(arguments.model, torch.float32)
    workload = f"{len(texts)}x{arguments.tokens}"
    common: Row = {"precision": "float64", "workload": workload}
    rows = [common | {"format": "exact"} | end_to_end(model, Replacement(), measured)]
    spec = model.spec
    for name, form in formats().items():
        if arguments.formats is not None and arguments.formats not in name:
            continue
        began = time.perf_counter()
        layers = fitted(form, calibration)
        stored = 2 * spec.head_size * form.bits / 8 + SCALE_BYTES * form.token_scales
        row = common | {"format": name, "bytes": stored} | errors(layers, measured)
        rows.append(row | end_to_end(model, replaced(layers), measured))
        print(f"{name}: KL {rows[-1]['kl']:.3e} ({time.perf_counter() - began:.0f} s)", flush=True)
    show(rows, f"K and V of {Path(arguments.model).name} in other formats, {workload} tokens")
    print(f"wrote {write_result('study', arguments.name, rows, arguments.out)}")


if __name__ == "__main__":
    main()
