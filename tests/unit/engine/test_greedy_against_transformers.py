"""Greedy generation equals transformers', token by token, in float32."""

from __future__ import annotations

from pathlib import Path

import torch

from octetrl.config.schema import EngineConfig, Fp8Config
from octetrl.engine.engine import Engine
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.records import GenerationRequest, SamplingParams
from tests.unit.engine.tiny_engine import Letters
from tests.unit.models.tiny_families import hf_model

NEW_TOKENS = 12


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    theirs = hf_model("qwen3-tied").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1 if parameter.dim() == 1 else 6)  # far from flat: greedy choices differ along the way
    theirs.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    policy = precision_policy(spec, Fp8Config())
    model = Decoder(spec, policy, "rollout", dtype=torch.float32)
    load_weights(model, tmp_path)
    engine = Engine(
        model,
        spec=spec,
        policy=policy,
        tokenizer=Letters(),
        config=EngineConfig(page_size=16, prefill_chunk=16),
        context_length=64,
        dtype=torch.float32,
        device="cpu",
    )
    prompts = [tuple((5 * n + 3 * i) % spec.vocab_size for i in range(n)) for n in (1, 7, 30)]
    sampling = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers = engine.generate([GenerationRequest(str(len(p)), p, sampling) for p in prompts])
    seen: set[int] = set()
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.token_ids == tuple(expected[0, len(prompt) :].tolist())
        seen.update(answer.token_ids)
    assert len(seen) > 5
