"""Compares the memory estimate with one measured training step of a real shape with fewer layers.

    python -m lab.memory --model qwen3-8b --layers 8 --checkpointing layer [--precision fp8_full]
        [--tokens 16384] [--states 8bit] [--master stochastic_rounding] [--offload] [--chunk 1024] [--out FOLDER]

`Trainer` runs one micro-batch of random tokens twice, in sequences of at most 8,192. The first call allocates what
stays (transposed codes, work space). The second is measured: the memory of each part, and the peak of the step above
it. "CUDA context" is the memory that the device lost beyond torch's own reservations. The peak must be within a tenth
of the estimate; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lab.record import RESULTS, need_hopper, write_result
from octetrl.algorithms.table import build_algorithm
from octetrl.bench.memory import estimate
from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.records import Sample
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.trainer import Trainer

LONGEST = 8192
LIMIT = 0.1
TRAINER_PARTS = ("weights", "FP8 copies", "gradients", "optimizer", "activations", "working set")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precision", default="fp8_full", choices=("bf16", "fp8", "fp8_full"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--checkpointing", default="layer", choices=("none", "attention", "layer"))
    parser.add_argument("--states", default="8bit", choices=("float32", "bfloat16", "8bit"))
    parser.add_argument("--master", default="stochastic_rounding", choices=("float32", "stochastic_rounding"))
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    optimizer = {"states": arguments.states, "master": arguments.master, "offload": arguments.offload}
    return recipe_from_mapping(
        {
            "model": {"path": "none", "context_length": LONGEST},
            "precision": arguments.precision,
            "environment": {"dataset": "none"},
            "trainer": {
                "tokens_per_micro_batch": arguments.tokens,
                "logprob_chunk": arguments.chunk,
                "activation_checkpointing": arguments.checkpointing,
                "optimizer": optimizer,
            },
        }
    )


def samples(tokens: int, vocab_size: int) -> list[Sample]:
    """Sequences that fill one micro-batch; all but each first token is trained on."""
    draw = random.Random(0)
    found: list[Sample] = []
    while tokens > 1:
        length = min(tokens, LONGEST)
        ids = tuple(draw.randrange(vocab_size) for _ in range(length))
        found.append(Sample(ids, (False,) + (True,) * (length - 1), (-10.0,) * length, 1.0 - len(found) % 2 * 2, 0))
        tokens -= length
    return found


def measured(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy) -> dict[str, int]:
    backend = choose_backend("cuda") if recipe.fp8.train else "emulated"
    model = Decoder(spec, policy, "train", device="cuda", backend=backend)
    model.random_init(0)
    after_model = torch.cuda.memory_allocated()
    trainer = Trainer(
        model,
        config=recipe.trainer,
        algorithm=build_algorithm(recipe.algorithm),
        temperature=1.0,
        total_steps=10,
        collect_kv_amax=policy.kv_mode == "calibrated",
    )
    batch = pack(samples(recipe.trainer.tokens_per_micro_batch, spec.vocab_size), trainer.layout, "token")
    scale_LS = torch.full((spec.num_layers, spec.num_cache_scales), 0.05, device="cuda")
    kv = KVReplay("calibrated", scale_LS) if policy.kv_mode == "calibrated" else KVReplay()
    after_optimizer = torch.cuda.memory_allocated()
    trainer.train(batch, kv, None)
    torch.cuda.synchronize()
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.train(batch, kv, None)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    codes = standing - after_optimizer  # transposed codes appear in the first backward
    return {
        "weights and FP8 copies": after_model + codes,
        "gradients and optimizer": after_optimizer - after_model,
        "activations and working set": torch.cuda.max_memory_allocated() - standing,
        "peak": torch.cuda.max_memory_allocated(),
        "CUDA context": total - free - torch.cuda.memory_reserved(),
        "reserved beyond allocated": torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    arguments = parse()
    need_hopper("memory")
    recipe = recipe_of(arguments)
    spec = replace(spec_from_config(preset_config(arguments.model)), num_layers=arguments.layers)
    policy = precision_policy(spec, recipe.fp8)
    parts = {part.name: part.num_bytes for part in estimate(recipe, spec, policy, on_gpu=True, engine=True).parts}
    expected = {
        "weights and FP8 copies": parts["weights"] + parts.get("FP8 copies", 0),
        "gradients and optimizer": parts["gradients"] + parts["optimizer"],
        "activations and working set": parts["activations"] + parts["working set"],
        "peak": sum(parts.get(name, 0) for name in TRAINER_PARTS),
        "CUDA context": parts["CUDA context"],
    }
    found = measured(recipe, spec, policy)
    table = Table("part", "estimated GB", "measured GB", "ratio")
    rows: list[dict[str, object]] = []
    for name, got in found.items():
        want = expected.get(name)
        ratio = None if want is None else want / max(got, 1)
        row: dict[str, object] = {"precision": arguments.precision, "workload": name}
        rows.append(row | {"estimated_gb": None if want is None else want / 1e9, "measured_gb": got / 1e9})
        table.add_row(
            name, "" if want is None else f"{want / 1e9:.2f}", f"{got / 1e9:.2f}", f"{ratio:.3f}" if ratio else ""
        )
    Console(width=100).print(table)
    setting = f"{arguments.model}_{arguments.layers}_{arguments.precision}_{arguments.checkpointing}_{arguments.states}"
    print(f"wrote {write_result('memory', setting, rows, arguments.out)}")
    off = expected["peak"] / found["peak"] - 1
    print(f"{'OK' if abs(off) <= LIMIT else 'FAIL'} the estimate of the peak is {off:+.1%} off")
    sys.exit(0 if abs(off) <= LIMIT else 1)


if __name__ == "__main__":
    main()
