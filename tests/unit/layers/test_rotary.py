"""The rotary table: scaled frequencies as transformers', llama3's three bands, positions the table doesn't have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from octetrl.layers.rotary import RotaryTable, frequencies
from octetrl.models.rope_config import rope_parameters, rope_scaling, scaled_positions, scaling_field
from octetrl.shapes.rope import Llama3Scaling, YarnScaling
from octetrl.system.json_file import JsonObject

SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_short_waves_are_kept_long_ones_slowed_and_the_rest_lies_between() -> None:
    plain_R, scaled_R = frequencies(128, 500_000.0, None), frequencies(128, 500_000.0, SCALING)
    wavelength_R = 2 * math.pi / plain_R
    short_R, long_R = wavelength_R < 8192 / 4, wavelength_R > 8192
    between_R = ~short_R & ~long_R
    assert short_R.any() and long_R.any() and between_R.any()
    assert torch.equal(scaled_R[short_R], plain_R[short_R])
    torch.testing.assert_close(scaled_R[long_R], plain_R[long_R] / 8)
    assert ((scaled_R < plain_R) & (scaled_R > plain_R / 8))[between_R].all()
    assert (scaled_R.diff() < 0).all()


def test_a_position_past_the_table_is_an_error() -> None:
    table = RotaryTable(32, 10_000.0, None, 16, device="cpu")
    table(torch.tensor([15]))
    with pytest.raises(IndexError):
        table(torch.tensor([16]))


def test_the_table_is_no_part_of_the_state() -> None:
    assert RotaryTable(32, 10_000.0, None, 16, device="cpu").state_dict() == {}


QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
DEEPSEEK = QWEN | {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "qwen": QWEN,
    "no original": {"rope_type": "yarn", "factor": 4.0},
    "no factor": QWEN | {"factor": None},
    "deepseek": DEEPSEEK,
    "mscale alone": DEEPSEEK | {"mscale_all_dim": 0},
    "attention_factor": DEEPSEEK | {"attention_factor": 1.25},
    "not truncated": QWEN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "one plane": QWEN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "everything slowed": QWEN | {"original_max_position_embeddings": 4, "factor": 256.0},
}


@pytest.mark.parametrize("head_size", [32, 80])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_equal_transformers(name: str, head_size: int) -> None:
    given: dict[str, Any] = {"rope_theta": 10_000.0, **SCALED[name]}
    positions = 1024
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=head_size,
        max_position_embeddings=positions,
        rope_parameters=dict(given),
    )
    theirs_R, their_factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu")
    content = JsonObject({"rope_parameters": given})
    scaling = rope_scaling(rope_parameters(content), content, positions)
    torch.testing.assert_close(frequencies(head_size, 10_000.0, scaling).float(), theirs_R, rtol=1e-5, atol=0)
    table = RotaryTable(head_size, 10_000.0, scaling, 4, device="cpu")
    torch.testing.assert_close(table.cos_SR[0], torch.full((head_size // 2,), their_factor))
    torch.testing.assert_close(table.sin_SR[3], (3 * theirs_R).sin() * their_factor)
    exported = JsonObject({"rope_theta": 10_000.0, "rope_scaling": scaling_field(scaling)})
    again = rope_scaling(rope_parameters(exported), exported, scaled_positions(scaling, positions))
    assert again == scaling


def test_mla_scales_its_softmax_by_mscale_all_dim() -> None:
    scaling = YarnScaling(factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=0.707)
    assert scaling.softmax_factor == pytest.approx(yarn_get_mscale(40.0, 0.707) ** 2)
    assert YarnScaling(factor=40.0, original_max_positions=4096).softmax_factor == 1.0


def test_a_recipe_that_leaves_the_length_alone_gets_the_longer_context() -> None:
    scaling = YarnScaling(factor=4.0, original_max_positions=32_768)
    assert scaled_positions(scaling, 40_960) == 131_072
    assert scaled_positions(scaling, 262_144) == 262_144
