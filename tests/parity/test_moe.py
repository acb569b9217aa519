"""Mixtures of experts: the engine's log-probs are the trainer's, bit for bit, though each token goes its own way.

`softmax` is Qwen3-MoE's routing. `sigmoid` is DeepSeek-V3's, with a correction bias, groups, a scale, a shared expert
and a dense first layer. `gated` is Qwen2-MoE's, whose shared expert has a gate, in a model that rotates half of each
head, as GLM-4.5 does. Experts' sizes are no multiples of 128, so FP8 blocks are ragged.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from octetrl.config.schema import LoraConfig
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, MixtureLayout, Routing
from octetrl.models.families import DENSE
from octetrl.records import GenerationRequest
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import Answers, Sides, random_requests
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer

SIGMOID = Routing(8, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5)
LAYERS = {
    "softmax": (LayerBlocks(AttentionLayout(), MixtureLayout(Routing(6, 2, "softmax", True), 48)),),
    "sigmoid": (*DENSE, LayerBlocks(AttentionLayout(), MixtureLayout(SIGMOID, 48, 96))),
    "gated": (LayerBlocks(AttentionLayout(rotated=8), GatedMixtureLayout(Routing(6, 2, "softmax", False), 48, 80)),),
}
MIXTURES: dict[str, ModelSpec] = {name: replace(TINY["qwen3"], blocks=blocks) for name, blocks in LAYERS.items()}
LONGEST = 60
MODELS = pytest.mark.parametrize(
    ("routing", "precision"), [("softmax", "bf16"), ("sigmoid", "fp8_full"), ("gated", "fp8_full")]
)


@lru_cache
def drawn(routing: str, precision: str) -> tuple[Sides, list[GenerationRequest], Answers]:
    """Some requests, and what an engine left alone answers."""
    draw = random.Random(f"{routing} {precision}")
    sides = Sides(MIXTURES[routing], precision)
    for name, parameter in sides.trainer_model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    asked = random_requests(draw, sides.spec, 1, prompts=(1, 10), answers=(20, 24), siblings=(3, 3), temperature=0.9)
    asked += random_requests(draw, sides.spec, 2, prompts=(20, LONGEST - 12), answers=(6, 12), temperature=0.9)
    return sides, asked, sides.engine().generate(asked)


@MODELS
def test_what_happens_in_the_engine_changes_nothing(routing: str, precision: str) -> None:
    sides, asked, answers = drawn(routing, precision)
    for name in ("one_by_one", "small_chunks", "prefix_hit"):
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name


@MODELS
def test_what_happens_in_the_trainer_changes_nothing(routing: str, precision: str) -> None:
    sides, asked, answers = drawn(routing, precision)
    for name in ("one sequence a micro-batch", "layers run again", "codes quantised again"):
        check_trainer(sides, asked, answers, **in_the_trainer(LONGEST)[name])


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_with_adapters_on_experts(precision: str) -> None:
    sides, draw = Sides(MIXTURES["sigmoid"], precision, lora=LoraConfig(rank=8, experts=True)), random.Random(3)
    adapted = {name for name, one in sides.trainer_model.adapters() if ".experts." in name and one.b.any()}
    assert len(adapted) == 2 * (sides.spec.num_layers - 1), "each has a B that is not zero"
    asked = random_requests(draw, sides.spec, 3, prompts=(1, 20), answers=(6, 12), siblings=(1, 3), temperature=0.9)
    answers = sides.engine().generate(asked)
    for name in ("one_by_one", "small_chunks"):
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name
    for name in ("one sequence a micro-batch", "layers run again"):
        check_trainer(sides, asked, answers, **in_the_trainer(LONGEST)[name])


def test_every_step_of_a_run_says_that_nothing_differs_and_runs_repeat() -> None:
    spec = MIXTURES["sigmoid"]
    runs = [short_run(spec, "fp8_full", "cpu", 2, answers=6, tokens_per_micro_batch=256) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])
