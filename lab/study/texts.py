"""The texts that a pretrained model is measured on: two pieces of each of five kinds, one to calibrate, one to measure.

    licence   this repository's LICENSE, formal English
    code      the source of Python's `heapq`
    manual    this repository's docs/collapse.md
    sums      conversations of the study's task, with the right answer, one after another
    answers   what the model itself says: sampled in BF16 by the engine at temperature 1, after a question

A calibrated cache has the largest magnitudes of the first pieces of all kinds, as a step's scales come from the texts
of the step before.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octetrl import LLM, SamplingParams
from octetrl.config.schema import EnvironmentConfig
from octetrl.data.tokenizer import Tokenizer, load_tokenizer
from octetrl.environments.tasks import Taskset
from octetrl.run.environment import build_environment

ROOT = Path(__file__).parents[2]
KINDS = ("licence", "code", "manual", "sums", "answers")
QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "List the steps to bake bread.",
)


@dataclass(frozen=True, slots=True)
class Text:
    kind: str
    calibration_T: Tensor  # int64
    measured_T: Tensor


def read_texts(folder: str, tokens: int, kinds: tuple[str, ...] = KINDS) -> list[Text]:
    """`tokens` tokens for each piece. The model's own answers are shorter pieces, one after another."""
    tokenizer = load_tokenizer(folder)
    found = []
    for kind in kinds:
        ids = sampled_tokens(folder, tokenizer, tokens) if kind == "answers" else list(_tokens(tokenizer, kind))
        assert len(ids) >= 2 * tokens, f"'{kind}' has {len(ids)} tokens of {2 * tokens}"
        ids_T = torch.tensor(ids[: 2 * tokens])
        found.append(Text(kind, ids_T[:tokens], ids_T[tokens:]))
    return found


def _tokens(tokenizer: Tokenizer, kind: str) -> Iterator[int]:
    if kind == "sums":
        for prompt, answer in _sums():
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            yield from tokenizer.encode(
                "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in said)
            )
        return
    sources = {
        "licence": lambda: (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "code": lambda: inspect.getsource(heapq),
        "manual": lambda: (ROOT / "docs" / "collapse.md").read_text(encoding="utf-8"),
    }
    yield from tokenizer.encode(sources[kind]())


def _sums() -> Iterator[tuple[str, str]]:
    config = EnvironmentConfig(
        kind="reasoning_gym",
        dataset="chain_sum",
        parameters={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
        train_size=256,
        eval_size=16,
    )
    for task in Taskset(build_environment(config).tasks, eval_size=16, seed=0).next_batch(128):
        yield task.text, f"The answer is {task.answer}."


def sampled_tokens(folder: str, tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Questions and the model's own answers, 2 x `tokens` tokens or more."""
    each = -(-2 * tokens // len(QUESTIONS))
    llm = LLM(folder, device="cpu", context_length=each + 64, kv_cache_tokens=(each + 192) * len(QUESTIONS))
    sampling = SamplingParams(max_tokens=each, temperature=1.0, seed=0, ignore_eos=True)
    outputs = llm.generate(list(QUESTIONS), sampling)
    return [token for output in outputs for token in (*output.prompt_token_ids, *output.token_ids)]
