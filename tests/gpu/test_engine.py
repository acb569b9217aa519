"""The engine on the GPU: the trainer's log-probs, and the same answers in any company and after preemption.

Equality is asked of FP8 linears; BF16 linears go through cuBLAS, which may split K at a few rows (docs/fp8.md §10), so
there the log-probs of the same tokens are compared.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.engine import Engine
from octetrl.engine.sampler import SamplingRows, sample, sequence_key
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.kv_scales import kv_scales_from_amax
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.records import Completion, GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu

SPEC = spec_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 3,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
)
FP8 = {
    "fp8": Fp8Config(rollout=True, train=True),
    "fp8_full": Fp8Config(rollout=True, train=True, kv_cache="calibrated"),
    "fp8_dynamic": Fp8Config(rollout=True, train=True, kv_cache="dynamic"),
    "fp8_int8": Fp8Config(rollout=True, train=True, kv_cache="int8"),
}
PRECISIONS = {"bf16": Fp8Config(), **FP8}


class NoText:
    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return ""


class Bench:
    """A trainer-side and an engine-side model with the same weights, and KV scales calibrated on the prompts."""

    def __init__(self, precision: str) -> None:
        self.policy = precision_policy(SPEC, PRECISIONS[precision])
        backend = choose_backend("cuda")
        self.models = {s: Decoder(SPEC, self.policy, s, device="cuda", backend=backend) for s in ("train", "rollout")}  # type: ignore[arg-type]
        for model in self.models.values():
            model.random_init(seed=0)
        self.scales = None
        if self.policy.kv_mode == "calibrated":
            amax_LS = torch.full((SPEC.num_layers, SPEC.num_cache_scales), -1.0, device="cuda")
            self.packed([one.prompt_token_ids for one in ASKED], kv_mode="none", kv_amax_LS=amax_LS)
            self.scales = kv_scales_from_amax(amax_LS, SPEC, margin=1.5, policy_version=0)

    def engine(self, **config: int) -> Engine:
        settings = {"page_size": 128, "kv_cache_tokens": 1 << 15, **config}
        engine = Engine(
            self.models["rollout"], spec=SPEC, policy=self.policy, tokenizer=NoText(), config=EngineConfig(**settings),
            context_length=1024, dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        if self.scales is not None:
            engine.set_kv_scales(self.scales)
        return engine

    @torch.no_grad()
    def packed(self, sequences: list[tuple[int, ...]], **context: object) -> tuple[Tensor, Tensor]:
        lengths = [len(sequence) for sequence in sequences]
        cu_seqlens_B1 = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], device="cuda")
        positions_T = torch.cat([torch.arange(length, device="cuda") for length in lengths])
        packed = PackedContext(cu_seqlens_B1, max(lengths), **context)  # type: ignore[arg-type]
        return tokens_T, self.models["train"](tokens_T, positions_T, packed)

    def trainer_logprobs(self, asked: GenerationRequest, answers: list[Completion]) -> list[Tensor]:
        sequences = [asked.prompt_token_ids + answer.token_ids for answer in answers]
        context: dict[str, object] = {"kv_mode": self.policy.kv_mode}
        if self.scales is not None:
            context |= {"kv_scale_LS": self.scales.scale_LS}
        tokens_T, hidden_TE = self.packed(sequences, **context)
        with torch.no_grad():
            logprobs_T, _ = self.models["train"].logprobs(hidden_TE[:-1], tokens_T[1:], asked.sampling.temperature)
        first, parts, end = len(asked.prompt_token_ids) - 1, [], 0
        for sequence in sequences:
            parts.append(logprobs_T[end + first : end + len(sequence) - 1].cpu())
            end += len(sequence)
        return parts


def _asked(index: int, prompt_length: int, num_siblings: int, new: int, **sampling: float) -> GenerationRequest:
    prompt = tuple((index + 31 * i) % SPEC.vocab_size for i in range(prompt_length))
    return GenerationRequest(str(index), prompt, SamplingParams(new, **sampling), num_siblings, seed=index)  # type: ignore[arg-type]


ASKED = [
    _asked(0, 200, 8, 40),
    _asked(1, 1, 4, 30, temperature=0.7),
    _asked(2, 129, 3, 60, top_p=0.9),
    _asked(3, 300, 2, 20, top_k=50),
]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probs_are_the_trainers(precision: str) -> None:
    bench = Bench(precision)
    answers = bench.engine().generate(ASKED)
    for asked, siblings in zip(ASKED, answers, strict=True):
        for answer, theirs in zip(siblings, bench.trainer_logprobs(asked, siblings), strict=True):
            ours = torch.tensor(answer.logprobs)
            if precision == "bf16":
                assert (ours - theirs).abs().max() < 0.05
            else:
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", FP8)
def test_company_and_preemption_change_nothing(precision: str) -> None:
    bench = Bench(precision)
    expected = bench.engine().generate(ASKED)
    crowded = bench.engine(page_size=16, prefill_chunk=64, max_batch=5)
    assert crowded.generate(ASKED[::-1])[::-1] == expected
    tight = bench.engine(page_size=16, kv_cache_tokens=512)
    assert tight.generate(ASKED) == expected
    assert tight.metrics is not None and tight.metrics.preemptions > 0
    assert bench.engine().generate(ASKED[2:3]) == expected[2:3]


def test_a_large_vocabulary_is_sampled_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(64, 151_936) * 3

    def drawn(device: str) -> Tensor:
        rows = SamplingRows(
            key_N=torch.tensor([sequence_key(n, 0) for n in range(64)], device=device),
            counter_N=torch.arange(64, device=device),
            temperature_N=torch.ones(64, device=device),
            top_k_N=torch.zeros(64, dtype=torch.int64, device=device),
            top_p_N=torch.full((64,), 0.95, device=device),
            min_p_N=torch.zeros(64, device=device),
            draws=True,
            filters=True,
        )
        return sample(logits_NV.to(device), rows).cpu()

    assert torch.equal(drawn("cuda"), drawn("cpu"))


def test_capacity_follows_free_memory() -> None:
    bench = Bench("fp8_full")
    engine = bench.engine()
    engine._config = EngineConfig(kv_memory_fraction=0.01)
    engine.wake()
    engine.generate(ASKED[:1])
    assert engine.metrics is not None and engine.metrics.kv_capacity_tokens > 10_000
