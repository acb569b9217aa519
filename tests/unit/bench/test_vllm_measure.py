"""The process that measures vLLM, over a package of this test in vLLM's place: what is timed, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from octetrl.backends.vllm import measure
from octetrl.backends.vllm.measure import Asked, AskedRequest
from octetrl.config.vllm import VLLM_VERSION
from tests.unit.backends.vllm_modules import installed_vllm

REQUESTS = [AskedRequest([1, 2, 3], 4, 2, seed=7, temperature=0.5), AskedRequest([4], 6, 1, seed=8, temperature=1.0)]
ASKED = Asked("folder", "fp8_e4m3", 64, 8, 0.9, REQUESTS)
TOKENS = 2 * 4 + 6


class Llm:
    """`vllm.LLM`. `calls`: in order, the tokens of a call's answers, or that prefixes were dropped."""

    calls: list[int | str]
    settings: dict[str, Any]
    params: list[SimpleNamespace]
    short = 0  # tokens that the last answer lacks
    without_logprobs = False
    drops = True

    def __init__(self, **settings: Any) -> None:
        type(self).settings = settings
        cache = SimpleNamespace(num_gpu_blocks=11, block_size=16)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))

    def generate(self, prompts: list[dict[str, Any]], params: list[SimpleNamespace], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and [one["prompt_token_ids"] for one in prompts] == [
            one.prompt for one in REQUESTS[: len(prompts)]
        ]
        type(self).params = params
        lengths = [[one.max_tokens] * one.n for one in params]
        lengths[-1][-1] -= self.short if len(prompts) > 1 else 0
        self.calls.append(sum(map(sum, lengths)))
        return [SimpleNamespace(outputs=[self._answer(length) for length in group]) for group in lengths]

    def _answer(self, length: int) -> SimpleNamespace:
        return SimpleNamespace(token_ids=[0] * length, logprobs=[0.0] * (0 if self.without_logprobs else length))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("prefixes dropped")
        return self.drops


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Llm]]:
    class Fresh(Llm):
        calls: ClassVar[list[int | str]] = []

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": Fresh, "SamplingParams": lambda **given: SimpleNamespace(**given)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }
    with installed_vllm(monkeypatch, contents):
        yield Fresh


def test_the_whole_workload_runs_once_before_it_is_timed(llm: type[Llm], tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text(json.dumps(asdict(ASKED)))
    measure.main([str(tmp_path / "asked.json"), str(tmp_path / "result.json")])
    assert llm.calls == [1, 1, TOKENS, "prefixes dropped", TOKENS]
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["generated_tokens"], found["kv_capacity_tokens"], found["version"]) == (TOKENS, 176, VLLM_VERSION)
    assert 0 < found["seconds"] < 60 and 0 < found["first_token_seconds"] < found["startup_seconds"] + 60
    assert llm.settings["kv_cache_dtype"] == "fp8_e4m3" and llm.settings["logprobs_mode"] == "processed_logprobs"
    assert (llm.settings["max_model_len"], llm.settings["max_num_seqs"]) == (64, 8)
    assert [(one.n, one.max_tokens, one.seed, one.temperature) for one in llm.params] == [
        (2, 4, 7, 0.5),
        (1, 6, 8, 1.0),
    ]
    assert all(one.ignore_eos and one.logprobs == 0 and one.flat_logprobs for one in llm.params)
    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"short": 1}, f"vLLM generated {TOKENS - 1} tokens, and {TOKENS} were asked for"),
        ({"without_logprobs": True}, "vLLM returned tokens without their log-probs"),
        ({"drops": False}, "vLLM did not drop the prefixes of the warm-up"),
    ],
)
def test_a_measurement_that_is_none_is_an_error(fault: dict[str, Any], expected: str, llm: type[Llm]) -> None:
    for name, value in fault.items():
        setattr(llm, name, value)
    with pytest.raises(RuntimeError, match=expected):
        measure.run(ASKED)


def test_another_version_measures_nothing(llm: type[Llm], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.config.vllm.version", lambda _: "0.29.0")
    with pytest.raises(SystemExit, match=r"octetrl: engine.backend: vllm 0.29.0 is installed"):
        measure.main(["asked.json", "result.json"])
    assert not llm.calls
