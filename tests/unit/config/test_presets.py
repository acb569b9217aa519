from __future__ import annotations

from typing import get_args

import pytest

from octetrl.config.schema import Preset
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import PRESETS, preset_config
from octetrl.system.errors import UserError


@pytest.mark.parametrize(
    ("name", "parameters", "tied"),
    [
        ("tiny", 1_033_600, True),
        ("qwen3-0.6b", 596_049_920, True),
        ("qwen3-1.7b", 1_720_574_976, True),
        ("qwen3-8b", 8_190_735_360, False),
        ("qwen3-14b", 14_768_307_200, False),
        ("qwen3-32b", 32_762_123_264, False),
        ("llama-3.1-8b", 8_030_261_248, False),
        ("llama-3.1-70b", 70_553_706_496, False),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: int, tied: bool) -> None:
    spec = spec_from_config(preset_config(name))
    assert spec.num_parameters == parameters
    assert (spec.tied_embeddings, spec.qk_norm) == (tied, not name.startswith("llama"))


def test_a_recipe_may_name_every_preset() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    with pytest.raises(UserError, match="did you mean 'qwen3-8b'"):
        preset_config("qwen3-8")
