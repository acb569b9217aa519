"""The whole decoder on the GPU: near a float32 CPU run, and engine and trainer equal bit for bit in every precision."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.engine.kv_cache import KVCache, cache_format
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.policy import Side, precision_policy
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.linear_logprobs import logprobs_of
from octetrl.layers.context import PackedContext, PagedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.spec import ModelSpec

pytestmark = pytest.mark.gpu

LENGTHS = [300, 1, 129, 700]
PAGE_SIZE = 128
PRECISIONS = {
    "bf16": Fp8Config(),
    "fp8": Fp8Config(rollout=True, train=True),
    "fp8_full": Fp8Config(rollout=True, train=True, kv_cache="calibrated"),
    "fp8_dynamic": Fp8Config(rollout=True, train=True, kv_cache="dynamic"),
}


def _spec(architecture: str = "Qwen3ForCausalLM") -> ModelSpec:
    return spec_from_config(
        {
            "architectures": [architecture],
            "num_hidden_layers": 3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32_000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )


def _decoder(
    side: Side, fp8: Fp8Config, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, spec: ModelSpec | None = None
) -> Decoder:
    spec = spec or _spec()
    backend = choose_backend(device, None if device == "cuda" else True)
    model = Decoder(spec, precision_policy(spec, fp8), side, dtype=dtype, device=device, backend=backend)
    model.random_init(seed=0)
    return model


def _tokens(device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    token_ids_T = torch.randint(32_000, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    cu_seqlens_B1 = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return token_ids_T.to(device), positions_T.to(device), cu_seqlens_B1.to(device)


def _step(model: Decoder, device: str) -> tuple[Tensor, Tensor]:
    token_ids_T, positions_T, cu_seqlens_B1 = _tokens(device)
    hidden_TE = model(token_ids_T, positions_T, PackedContext(cu_seqlens_B1, max(LENGTHS)))
    logprobs_N, _ = model.logprobs(hidden_TE, token_ids_T.roll(-1), chunk=512)
    logprobs_N.mean().backward()
    gradient = model.get_parameter("layers.0.mlp.gate_up_proj.weight").grad
    assert gradient is not None
    return hidden_TE.detach(), gradient


@pytest.fixture(scope="module")
def exact_step() -> tuple[Tensor, Tensor]:
    return _step(_decoder("train", Fp8Config(), "cpu", torch.float32), "cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_hidden_states_and_gradients_are_as_near_to_float32_as_the_emulation(
    precision: str, exact_step: tuple[Tensor, Tensor]
) -> None:
    """The distance from float32 is the precision's own price. The emulation pays it with exact sums; so may the GPU."""
    emulated = _step(_decoder("train", PRECISIONS[precision], "cpu"), "cpu")
    ours = _step(_decoder("train", PRECISIONS[precision]), "cuda")
    for mine, theirs, truth in zip(ours, emulated, exact_step, strict=True):
        assert relative_error(mine, truth) <= 1.15 * relative_error(theirs, truth)


class _Engine:
    """The least that drives a rollout-side model: one sequence's pages each, all sequences together."""

    def __init__(self, model: Decoder, scale_LS: Tensor | None) -> None:
        self.model = model
        pages = [-(-length // PAGE_SIZE) for length in LENGTHS]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).tolist()
        self.table_BP = torch.full((len(LENGTHS), max(pages)), -1, dtype=torch.int32)
        for row, count in enumerate(pages):
            self.table_BP[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        page = cache_format(model.spec, model.policy, model.dtype, PAGE_SIZE)
        self.cache = KVCache(page, sum(pages), torch.device("cuda"), scale_LS)

    def forward(self, token_ids: list[Tensor], starts: list[int], rows: list[int]) -> Tensor:
        """Hidden states of these tokens of sequences `rows`, beginning at `starts`."""
        positions = [torch.arange(start, start + len(ids)) for start, ids in zip(starts, token_ids, strict=True)]
        slots = [
            self.table_BP[row].long()[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for row, at in zip(rows, positions, strict=True)
        ]
        counts = torch.tensor([0] + [len(ids) for ids in token_ids])
        contexts = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]
        context = PagedContext(
            layers=self.cache.layers,
            slot_mapping_T=torch.cat(slots).cuda(),
            block_table_BP=self.table_BP[rows].cuda(),
            cu_seqlens_q_B1=counts.cumsum(0).to(torch.int32).cuda(),
            context_lens_B=torch.tensor(contexts, dtype=torch.int32).cuda(),
            max_query_len=int(counts.max()),
            max_context_len=max(contexts),
        )
        return self.model(torch.cat(token_ids), torch.cat(positions).cuda(), context)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        *(("Qwen3ForCausalLM", precision) for precision in PRECISIONS),
        ("Qwen2ForCausalLM", "fp8_full"),
        ("Qwen2ForCausalLM", "fp8_dynamic"),
    ],
)
def test_engine_and_trainer_are_bit_equal(architecture: str, precision: str) -> None:
    """Prefill in two chunks, then eight decode steps together, against one packed forward.

    Qwen2 has no QK-norm: its FP8 cache holds K in BF16.

    The BF16 linears are cuBLAS's, which picks another order of sums for a few rows: there hidden states are only near.
    """
    trainer = _decoder("train", PRECISIONS[precision], spec=_spec(architecture))
    engine_model = _decoder("rollout", PRECISIONS[precision], spec=_spec(architecture))
    token_ids_T, positions_T, cu_seqlens_B1 = _tokens()
    spec, mode = trainer.spec, trainer.policy.kv_mode
    amax_LS = torch.zeros(spec.num_layers, spec.num_cache_scales, device="cuda")
    trainer(token_ids_T, positions_T, PackedContext(cu_seqlens_B1, max(LENGTHS), kv_amax_LS=amax_LS))
    scale_LS = amax_LS * 1.05 / 448 if mode == "calibrated" else None
    expected_TE = trainer(token_ids_T, positions_T, PackedContext(cu_seqlens_B1, max(LENGTHS), mode, scale_LS))

    engine = _Engine(engine_model, scale_LS)
    sequences = token_ids_T.split(LENGTHS)
    ours = [torch.empty_like(expected_TE[:length]) for length in LENGTHS]
    decoded = 8
    rows = [row for row, length in enumerate(LENGTHS) if length > decoded]
    first = [(LENGTHS[row] - decoded) // 2 + 3 for row in rows]
    bounds = [[0] * len(rows), first, *([LENGTHS[row] - decoded + step for row in rows] for step in range(decoded + 1))]
    for starts, ends in pairwise(bounds):
        chunks = [sequences[row][start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        hidden_TE = engine.forward(chunks, starts, rows)
        for row, start, end, part in zip(rows, starts, ends, hidden_TE.split([len(c) for c in chunks]), strict=True):
            ours[row][start:end] = part
    for row in rows:
        expected = expected_TE.split(LENGTHS)[row]
        if precision == "bf16":
            assert relative_error(ours[row], expected) < 0.01
        else:
            assert torch.equal(ours[row], expected), f"sequence of {LENGTHS[row]}"
        targets = sequences[row][1:]
        trained, _ = trainer.logprobs(ours[row][:-1], targets, chunk=200)
        sampled, _ = logprobs_of(engine_model.logits(ours[row][-9:-1]), targets[-8:])
        assert torch.equal(sampled, trained[-8:])
