"""Parity of a pretrained model, whose activations have the outliers and attention sinks that random weights lack.

bash setup/smollm2.sh models/SmolLM2-135M-Instruct
OCTETRL_MODEL=FOLDER python -m pytest -m gpu tests/gpu/test_real_model.py    # another folder
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from octetrl.models.families import load_spec
from octetrl.records import GenerationRequest, SamplingParams
from tests.parity.sides import PRECISIONS, Sides
from tests.parity.situations import check_situations, check_trainer
from tests.required import missing

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
# (prompt, answer, siblings), in tokens: answers that outgrow a small cache, a few of any length, a long prompt
ASKED = [(8, 125, 8), (210, 25, 3), (1, 60, 1), (124, 19, 2)]
LONG = [(1500, 300, 2)]
CONTEXT = 2048


@pytest.fixture(scope="module")
def folder() -> Path:
    found = Path(os.environ.get("OCTETRL_MODEL", ROOT / "models" / "SmolLM2-135M-Instruct"))
    if not (found / "config.json").is_file():
        missing("real-model", f"no model in '{found.name}'; run: bash setup/smollm2.sh models/SmolLM2-135M-Instruct")
    return found


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    """Tokens of English and of code, in turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pages = [(ROOT / name).read_text() for name in ("README.md", "octetrl/run/step.py", "docs/parity.md")]
    return [token for page in pages for token in tokenizer.encode(page)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_happens_in_engine_and_trainer_changes_nothing(folder: Path, text: list[int], precision: str) -> None:
    draw = random.Random(7)

    def some_text(length: int) -> tuple[int, ...]:
        start = draw.randrange(len(text) - length)
        return tuple(text[start : start + length])

    def requests(sizes: list[tuple[int, int, int]]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                str(index),
                some_text(prompt),
                SamplingParams(answer, temperature=0.9, ignore_eos=True),
                num_siblings=siblings,
                seed=index,
            )
            for index, (prompt, answer, siblings) in enumerate(sizes)
        ]

    sides = Sides(load_spec(folder), precision, DEVICE, folder=folder, calibrate_on=[some_text(1000)])

    asked, long = requests(ASKED), requests(LONG)
    check_situations(sides, asked, context_length=CONTEXT)
    answers = sides.engine(context_length=CONTEXT, kv_cache_tokens=1 << 14).generate(long)
    check_trainer(sides, long, answers, tokens_per_micro_batch=2 * CONTEXT)
