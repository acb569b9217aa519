"""Models with linear attention on a GPU: fused rollout, modules and trainer have the same bits, the layer's written
backward has the gradients of the modules to rounding, and nothing that happens in engine or trainer changes a bit.

Heads are of 128 in linear attention, as published, and of 128 of which half is rotated in attention."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from octetrl.models.blocks.gated_attention.layout import GatedAttentionLayout
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, Routing
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.delta_rule import DeltaShape
from octetrl.shapes.spec import ModelSpec
from tests.gpu.test_moe import WIDE
from tests.gpu.test_rollout_forward import ordered_modules
from tests.gpu.test_training_forward import FORMATS, check_against_the_modules
from tests.parity import sides as parity
from tests.parity.drafted import assert_drafts_change_nothing
from tests.parity.short_run import assert_equal_in_every_step, assert_same, short_run
from tests.parity.sides import Pages, Sides, random_chunks, random_requests, random_sequences, random_tokens
from tests.parity.situations import IN_THE_ENGINE, check_situations

pytestmark = pytest.mark.gpu
LENGTHS = [150, 1, 70, 300]
SHAPE = DeltaShape(2, 4, 128, 128)
GATED = GatedMixtureLayout(Routing(32, 4, "softmax", True), 256, 512)
SITUATIONS = tuple(name for name in IN_THE_ENGINE if name != "prompts_the_other_way")


def _model(grouped: bool, mlp: MLPLayout | GatedMixtureLayout) -> ModelSpec:
    linear, full = GatedDeltaLayout(SHAPE, grouped), GatedAttentionLayout(rotated=64)
    blocks = LayerBlocks(linear, mlp), LayerBlocks(full, mlp)
    return replace(WIDE, head_size=128, num_layers=2, qk_norm=True, offset_norms=True, blocks=blocks)


MODELS = {"qwen3_5": _model(False, MLPLayout()), "qwen3_next": _model(True, GATED)}


def sides_of(name: str, precision: str) -> Sides:
    spec = MODELS[name]
    return Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 300)])


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
@pytest.mark.parametrize("name", MODELS)
def test_the_fused_rollout_has_the_bits_of_modules_and_trainer(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, draw = sides_of(name, precision), random.Random(1)
    sequences = random_sequences(draw, sides.spec, LENGTHS)
    chunks = [*random_chunks(draw, [length - 1 for length in LENGTHS], (1, 16, 100))]
    chunks.append([(index, length - 1, length) for index, length in enumerate(LENGTHS)])
    fused, trainers = Pages(sides, sequences, 64).filled(chunks), sides.packed(sequences)
    tokens = [[(index, at, at + 1) for index, length in enumerate(LENGTHS) if at < length] for at in range(300)]
    one_by_one = Pages(sides, sequences, 64).filled(tokens)
    ordered_modules(monkeypatch)
    monkeypatch.setattr(parity, "can_fuse", lambda model: False)
    modules = Pages(sides, sequences, 64).filled(chunks)
    for ours, decoded, module, trainer in zip(fused, one_by_one, modules, trainers, strict=True):
        assert torch.equal(ours, trainer), "prefill is the packed forward"
        assert torch.equal(ours, decoded), "decode is prefill"
        assert torch.equal(ours, module), "the fused form is the module"


def test_the_trainers_form_is_the_modules_to_rounding() -> None:
    """In FP8: tests/unit/models/test_fused_forms.py, on a CPU."""
    check_against_the_modules(replace(MODELS["qwen3_5"], max_positions=1024), FORMATS["bf16"])


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3_5", "bf16"), ("qwen3_5", "fp8_full"), ("qwen3_next", "fp8_full")]
)
def test_what_happens_in_engine_and_trainer_changes_nothing(name: str, precision: str) -> None:
    sides, draw = sides_of(name, precision), random.Random(4)
    asked = random_requests(draw, sides.spec, 1, prompts=(1, 10), answers=(60, 70), siblings=(8, 8), temperature=0.9)
    asked += random_requests(draw, sides.spec, 3, prompts=(1, 250), answers=(20, 40), temperature=0.9)
    check_situations(sides, asked, engine=SITUATIONS)


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(("name", "precision"), [("qwen3_5", "bf16"), ("qwen3_next", "fp8_full")])
def test_drafts_and_their_captured_graphs_keep_every_bit(name: str, precision: str, poisoned: bool) -> None:
    """Wrong drafts are rows of states that are written again; `poisoned`: some of them are not finite."""
    spec, draw = replace(MODELS[name], tied_embeddings=False), random.Random(5)
    sides = Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 300)])
    asked = random_requests(draw, spec, 4, prompts=(1, 250), answers=(60, 140), siblings=(2, 2), temperature=0.9)
    poison = None
    if poisoned:
        poison = next(
            token for token in range(spec.vocab_size) if all(token not in one.prompt_token_ids for one in asked)
        )
        with torch.no_grad():
            sides.engine_model.embedding.weight[poison] = float("nan")
        asked = [replace(one, sampling=replace(one.sampling, stop_token_ids=(poison,))) for one in asked]
    answers, drafts = assert_drafts_change_nothing(sides, asked, poison=poison, kv_cache_tokens=1 << 14, max_batch=64)
    assert 0 < drafts.accepted < drafts.drafted
    if not poisoned:
        theirs, ours = sides.logprobs(asked, answers)
        assert theirs.equal(ours)


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_repeat_their_bits_and_no_step_has_a_mismatch(name: str) -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024}
    runs = [short_run(MODELS[name], "fp8_full", "cuda", 20, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert runs[0].metrics[0]["entropy"] != runs[0].metrics[-1]["entropy"], "nothing was learnt"
