"""Measures vLLM's generation speed in a process of its own: `python -m octetrl.backends.vllm.measure ASKED RESULT`.

ASKED is a JSON file of `Asked`, RESULT the JSON file of `Measured` that this writes. vLLM runs as its offline front
`LLM` runs it by default, with its scheduler in another process: that is how fast vLLM is, without our session around
it. Settings that decide what is computed are those of the backend (settings.py): scales as the weights have them, and
the log-prob of every sampled token after the temperature.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octetrl.backends.vllm.start import prepare_environment
from octetrl.config.vllm import VLLM_VERSION, why_no_vllm


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """A prompt and the length of its answers."""

    prompt: list[int]
    answer: int
    siblings: int
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Asked:
    """`folder`: a model folder with a config.json, whose weights are random."""

    folder: str
    kv_cache_dtype: str
    context_length: int
    max_batch: int
    memory_fraction: float
    requests: list[AskedRequest]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and what vLLM's cache holds."""

    startup_seconds: float  # to the first token
    first_token_seconds: float  # the same request again
    seconds: float
    generated_tokens: int
    kv_capacity_tokens: int
    version: str = VLLM_VERSION


def run(asked: Asked) -> Measured:
    """Start vLLM, run the whole workload once, forget its prefixes, and time it."""
    prepare_environment(in_process=False)
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        model=asked.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        max_model_len=asked.context_length,
        max_num_seqs=asked.max_batch,
        kv_cache_dtype=asked.kv_cache_dtype,
        gpu_memory_utilization=asked.memory_fraction,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    first = asked.requests[:1]
    _generate(llm, first, 1, siblings=1)
    up = time.perf_counter()
    _generate(llm, first, 1, siblings=1)
    again = time.perf_counter()
    _generate(llm, asked.requests, None)  # DeepGEMM compiles a kernel when it first meets a number of rows
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not drop the prefixes of the warm-up")
    start = time.perf_counter()
    generated = _generate(llm, asked.requests, None)
    seconds = time.perf_counter() - start
    expected = sum(one.siblings * one.answer for one in asked.requests)
    if generated != expected:
        raise RuntimeError(f"vLLM generated {generated} tokens, and {expected} were asked for")
    cache = llm.llm_engine.vllm_config.cache_config
    capacity = int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)
    return Measured(up - began, again - up, seconds, generated, capacity)


def _generate(llm: Any, requests: Sequence[AskedRequest], most: int | None, siblings: int | None = None) -> int:
    """The number of tokens. `most`: of each answer; None: as asked. Raises RuntimeError if a log-prob is missing."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = [{"prompt_token_ids": one.prompt} for one in requests]
    params = [
        SamplingParams(
            n=siblings or one.siblings,
            max_tokens=one.answer if most is None else min(most, one.answer),
            temperature=one.temperature,
            seed=one.seed,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for one in requests
    ]
    answers = [answer for output in llm.generate(prompts, params, use_tqdm=False) for answer in output.outputs]
    tokens = sum(len(answer.token_ids) for answer in answers)
    if sum(len(answer.logprobs) for answer in answers) != tokens:
        raise RuntimeError("vLLM returned tokens without their log-probs")
    return tokens


def main(arguments: Sequence[str]) -> None:
    """Measure what ASKED says."""
    why = why_no_vllm()
    if why is not None:
        raise SystemExit(f"octetrl: {why}")
    asked, result = (Path(argument) for argument in arguments)
    given = json.loads(asked.read_text(encoding="utf-8"))
    requests = [AskedRequest(**one) for one in given.pop("requests")]
    result.write_text(json.dumps(asdict(run(Asked(**given, requests=requests)))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
