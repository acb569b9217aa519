"""Sampling parameters take vLLM's names and say what else is meant."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.api.sampling import SamplingParams
from octetrl.records import SamplingParams as EngineSampling
from octetrl.system.errors import UserError


def test_the_engine_is_told_the_same() -> None:
    sampling = SamplingParams(
        n=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, stop="\n", stop_token_ids=[2], seed=4
    )
    assert sampling.for_engine() == EngineSampling(7, 0.5, 5, 0.9, 0.1, ("\n",), (2,))
    assert (sampling.n, sampling.seed) == (3, 4)
    assert SamplingParams().for_engine() == EngineSampling(16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_new_tokens": 8}, r"max_new_tokens is a recipe's name .*write max_tokens"),
        ({"temprature": 0.5}, "no field 'temprature'; did you mean 'temperature'"),
        ({"max_tokens": 0}, "max_tokens is 0; give a whole number from 1"),
        ({"n": 10**30}, r"n is 10{30}; give a whole number from 1 to 100,000$"),
        ({"max_tokens": 2**24 + 1}, "max_tokens is 16777217; give a whole number from 1 to 16,777,216$"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": True}, "top_p is True"),
        ({"stop": 5}, "stop is 5; give a list"),
        ({"stop": None}, "stop is None"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"ignore_eos": "x"}, "ignore_eos is 'x'; give True or False"),
        ({"max_tokens": 8.0}, "max_tokens is 8.0"),
        ({"n": True}, "n is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-40}, r"temperature is 1e-40; give 0 \(greedy\), or a number from 1e-08 to 10$"),
        ({"temperature": 1e300}, r"temperature is 1e\+300"),
        ({"top_p": 0.0}, "top_p is 0.0; give a number above 0"),
        ({"top_k": -1}, "top_k is -1; give a whole number from 0, which keeps all"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"seed": None}, "seed is None"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; give a whole number from 0, below 2\*\*64"),
    ],
)
def test_what_is_wrong_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^SamplingParams: {said}"):
        SamplingParams(**given)
