"""The Triton kernels' logic, run in the interpreter against the references. Bits and speed are judged on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
def errors():
    script = [sys.executable, "-m", "tests.unit.kernels.attention_interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


CACHES = ["none", "calibrated", "dynamic", "calibrated-v", "dynamic-v", "int8", "int8-v"]
CACHES += ["calibrated-k", "dynamic-k", "int8-k"]


SHAPES = ["head-80", "head-96-window-2", "decode-192", "decode-80-window-100"]
DECODES = [*(f"decode-{cache}" for cache in CACHES), "decode-small-pages"]
PACKS = [
    "packs-of-whole-tiles",
    "packs-calibrated",
    "packs-dynamic-with-an-empty-sequence",
    "packs-dynamic-k",
    "packs-of-more-than-one-search",
]


@pytest.mark.parametrize("case", [*CACHES, *DECODES, *SHAPES, *PACKS])
def test_kernels_agree_with_their_references(errors, case):
    too_far = {name: error for name, error in errors[case].items() if not error <= LIMITS[name]}
    assert too_far == {}
