"""How completions are sampled, with the names that vLLM's users know.

A recipe says `rollout.max_new_tokens`; here it is `max_tokens`, as in vLLM. Each place knows one name and names the
other one in its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octetrl import records
from octetrl.config.limits import MOST_COMPLETIONS, MOST_TEMPERATURE
from octetrl.config.schema import LEAST_TEMPERATURE
from octetrl.shapes.spec import MOST_TOKENS
from octetrl.system.errors import UserError, nearest


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How `LLM.generate` samples.

    n: completions of each prompt. max_tokens: most tokens of one completion. temperature: 0 is greedy. top_p, top_k,
    min_p: choose which tokens may be drawn; 1.0, 0 and 0.0 keep all. stop: texts that end a completion; its text ends
    before them. stop_token_ids: tokens that end it, besides the tokenizer's EOS. seed: the same seed gives the same
    completions. Unlike vLLM's, it is 0 and not random where none is given.

    Raises UserError for a value out of range and for a name that it does not have.

    Example: SamplingParams(n=4, temperature=0.8, max_tokens=64, stop=["Question:"])
    """

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int

    def __init__(
        self,
        *,
        n: int = 1,
        max_tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise _unknown(name)
        values: dict[str, Any] = {
            "n": n, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
            "min_p": min_p, "stop": _as_tuple("stop", [stop] if isinstance(stop, str) else stop),
            "stop_token_ids": _as_tuple("stop_token_ids", stop_token_ids), "ignore_eos": ignore_eos, "seed": seed,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name, value, most in (("n", self.n, MOST_COMPLETIONS), ("max_tokens", self.max_tokens, MOST_TOKENS)):
            _require(name, value, f"a whole number from 1 to {most:,}", _is_whole(value, 1) and value <= most)
        usable = self.temperature == 0 or _is_within(self.temperature, LEAST_TEMPERATURE, MOST_TEMPERATURE)
        allowed = f"0 (greedy), or a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
        _require("temperature", self.temperature, allowed, usable)
        in_range = _is_within(self.top_p, 0.0, 1.0) and self.top_p > 0
        _require("top_p", self.top_p, "a number above 0 and at most 1", in_range)
        _require("top_k", self.top_k, "a whole number from 0, which keeps all tokens", _is_whole(self.top_k, 0))
        _require("min_p", self.min_p, "a number from 0 to 1", _is_within(self.min_p, 0.0, 1.0))
        texts = all(isinstance(text, str) and text for text in self.stop)
        _require("stop", self.stop, "texts that are not empty", texts)
        tokens = all(_is_whole(token, 0) for token in self.stop_token_ids)
        _require("stop_token_ids", self.stop_token_ids, "token ids, whole numbers from 0", tokens)
        _require("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool))
        in_64_bits = _is_whole(self.seed, 0) and self.seed < 1 << 64
        _require("seed", self.seed, "a whole number from 0, below 2**64", in_64_bits)

    def for_engine(self) -> records.SamplingParams:
        """The engine's form, without `n` and `seed`, which belong to a request."""
        return records.SamplingParams(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


def _unknown(name: str) -> UserError:
    if name == "max_new_tokens":
        return UserError("SamplingParams: max_new_tokens is a recipe's name (rollout.max_new_tokens); write max_tokens")
    known = [name for name in SamplingParams.__slots__ if not name.startswith("_")]
    return UserError(f"SamplingParams: no field '{name}'{nearest(name, known)}; there are {', '.join(known)}")


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """Raises UserError for what is no sequence."""
    _require(name, values, "a list", isinstance(values, Iterable))
    return tuple(values)


def _require(name: str, value: object, allowed: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise UserError(f"SamplingParams: {name} is {value!r}; give {allowed}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # NaN is not
