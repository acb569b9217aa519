"""Latent attention with a mixture of experts: the engine's log-probs are the trainer's, bit for bit.

`direct` has queries of one projection, as Moonlight; `low_rank` has latents of queries too, YaRN, and a latent size
that is no power of two. `fp8_full` means scales of tokens here: nothing of a latent is calibrated.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from octetrl.config.schema import LoraConfig
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.records import GenerationRequest
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.rope import YarnScaling
from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_same, short_run
from tests.parity.sides import Answers, Pages, Sides, random_requests, random_sequences
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer

MIXTURE = MixtureLayout(Routing(8, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5), 48, 96)
DIRECT, LOW_RANK = LatentAttentionLayout(32, 0, 24, 8, 16), LatentAttentionLayout(48, 40, 16, 16, 24)
YARN = YarnScaling(4.0, 32, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.707)
_SPEC = replace(TINY["qwen3"], qk_norm=False, num_kv_heads=4, head_size=32)
MODELS: dict[str, ModelSpec] = {
    "direct": replace(_SPEC, blocks=(LayerBlocks(DIRECT, MLPLayout()), LayerBlocks(DIRECT, MIXTURE))),
    "low_rank": replace(_SPEC, blocks=(LayerBlocks(LOW_RANK, MIXTURE),), rope_scaling=YARN),
}
IN_TURN = {"direct": ("small_chunks", "next_turn"), "low_rank": ("one_by_one", "prefix_hit")}
LONGEST = 80
NAMED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = pytest.mark.parametrize(("model", "precision"), [("direct", "bf16"), ("low_rank", "fp8_full")])


@lru_cache
def drawn(model: str, precision: str, lora: bool = False) -> tuple[Sides, list[GenerationRequest], Answers]:
    """Some requests, and what an engine left alone answers."""
    draw = random.Random(f"{model} {precision}")
    sides = Sides(MODELS[model], precision, lora=LoraConfig(rank=4, targets=NAMED) if lora else None)
    for name, parameter in sides.trainer_model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    asked = random_requests(draw, sides.spec, 1, prompts=(1, 10), answers=(10, 12), siblings=(3, 3), temperature=0.9)
    asked += random_requests(draw, sides.spec, 2, prompts=(60, LONGEST - 12), answers=(5, 7), temperature=0.9)
    return sides, asked, sides.engine().generate(asked)


@CASES
def test_what_happens_in_the_engine_changes_nothing(model: str, precision: str) -> None:
    sides, asked, answers = drawn(model, precision)
    for name in IN_TURN[model]:
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name


def test_a_preempted_sequence_is_computed_again_to_the_same_bits() -> None:
    sides, _, _ = drawn("low_rank", "fp8_full")
    asked = random_requests(random.Random(3), sides.spec, 1, prompts=(9, 9), answers=(40, 40), siblings=(2, 2))
    assert IN_THE_ENGINE["preempted"](sides.engine, asked) == sides.engine().generate(asked)


@CASES
def test_what_happens_in_the_trainer_changes_nothing(model: str, precision: str) -> None:
    sides, asked, answers = drawn(model, precision)
    for name in ("one sequence a micro-batch", "layers run again", "codes quantised again"):
        check_trainer(sides, asked, answers, **in_the_trainer(LONGEST)[name])


def test_with_adapters() -> None:
    sides, asked, answers = drawn("low_rank", "fp8_full", lora=True)
    assert {name.rsplit(".", 1)[1] for name, _ in sides.trainer_model.adapters() if ".attention." in name} == {
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
    }
    check_trainer(sides, asked, answers, **in_the_trainer(LONGEST)["one sequence a micro-batch"])


@pytest.mark.parametrize("precision", ["fp8", "fp8_full"])
def test_decode_prefill_and_training_have_the_same_hidden_states(precision: str) -> None:
    """Over more than a chunk of 1,024 keys, which the three merge in the same order."""
    spec = replace(MODELS["low_rank"], max_positions=1_200, num_layers=1)
    sides = Sides(spec, precision)
    sequences = random_sequences(random.Random(1), spec, [1_060, 65])
    pieces = [[(0, 0, 700), (1, 0, 63)], [(0, 700, 1_050), (1, 63, 64)], [(1, 64, 65)]]
    pieces += [[(0, at, at + 1)] for at in range(1_050, 1_060)]
    for paged, packed in zip(Pages(sides, sequences, 32).filled(pieces), sides.packed(sequences), strict=True):
        assert torch.equal(paged, packed)


@pytest.mark.parametrize("model", MODELS)
def test_every_step_of_a_run_says_that_nothing_differs_and_runs_repeat(model: str) -> None:
    runs = [short_run(MODELS[model], "fp8_full", "cpu", 2, answers=6, tokens_per_micro_batch=256) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert runs[0].metrics[0]["entropy"] != runs[0].metrics[-1]["entropy"], "nothing was learnt"
