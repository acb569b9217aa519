"""The Triton kernels' logic, run in the interpreter against the references. Bits and speed are judged on a GPU."""

from __future__ import annotations

import pytest

from tests.unit.kernels.attention_interpreted import CASES, DECODES, PACKS
from tests.unit.kernels.drafts_interpreted import CASES as DRAFTS
from tests.unit.kernels.interpreting import run_interpreted

CODES = 0.1  # the interpreter rounds some FP8 values to the neighbouring code
BF16 = 0.01
LIMITS = {
    "store": CODES,
    "replay": CODES,
    "saturated": 0.0,
    "token_scale": 0.0,
    "prefill": BF16,
    "decode": BF16,
    "padding": 0.0,
    "split": 0.0,
    "out_scale": 0.0,
    "out_codes": CODES,
    "packed": BF16,
    "lse2": 1e-5,
    "dq": BF16,
    "dk": BF16,
    "dv": BF16,
    "past": 0.0,  # values that are not zero in rows past the last sequence
}


@pytest.fixture(scope="module")
def found():
    return run_interpreted("tests.unit.kernels.attention_interpreted")


@pytest.mark.parametrize("case", [*CASES, *DECODES, *PACKS])
def test_kernels_agree_with_their_references(found, case):
    too_far = {name: error for name, error in found["errors"][case].items() if not error <= LIMITS[name]}
    assert too_far == {}


@pytest.mark.parametrize("case", DRAFTS)
def test_rows_that_share_a_program_have_the_bytes_of_rows_alone(found, case):
    drafted = found["drafts"][case]
    assert drafted["rows of a program"] >= 2
    assert drafted["other bytes"] == 0
    assert drafted["error"] < BF16
