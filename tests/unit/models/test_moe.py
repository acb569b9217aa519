"""The mixture of experts against written-out formulas, and what must not change a token's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import adapter_elements
from octetrl.config.memory import Precisions, estimate_memory
from octetrl.config.schema import LoraConfig, RouterConfig
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import quantize_activation_reference, quantize_weight_reference
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.rows.combine_experts import ExpertSum, combine_experts
from octetrl.kernels.rows.silu_mul import silu_mul, silu_mul_backward_reference, silu_mul_reference
from octetrl.layers.context import PackedContext, RouterRecord
from octetrl.layers.rotary import RotaryTable
from octetrl.layers.stacked import Float8StackedLinear, StackedLinear, group_rows
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.block import RolloutInputs, TrainingInputs
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.blocks.moe.experts import run_experts
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, MixtureLayout, Routing
from octetrl.models.blocks.moe.module import MixtureOfExperts, combine, gather
from octetrl.models.blocks.moe.routing import route
from octetrl.models.blocks.normed import BothForms, add_norm, values_of
from octetrl.models.blocks.products import Input
from octetrl.models.decoder import Decoder
from octetrl.models.families import DENSE
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.prepared import MetricMeans
from octetrl.trainer.reference import Reference
from octetrl.trainer.routers import Routers
from tests.objectives import objective
from tests.parity.shapes import TINY

SOFTMAX = Routing(6, 2, "softmax", renormalise=True)
SIGMOID = Routing(8, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5)
FP8 = Fp8Config(rollout=True, train=True)
FORMS = pytest.mark.parametrize(
    ("fp8", "kind"),
    [(Fp8Config(), MixtureLayout), (FP8, MixtureLayout), (FP8, GatedMixtureLayout)],
    ids=["bf16", "fp8", "gated fp8"],
)
CONTEXT = PackedContext(torch.tensor([0, 1], dtype=torch.int32), 1)  # the mixture reads nothing of it
ROTARY = RotaryTable(16, 1e4, None, 8, device="cpu")(torch.zeros(1, dtype=torch.int64))


def spec_of(layout: MixtureLayout, **changes: Any) -> ModelSpec:
    return replace(TINY["qwen3"], blocks=(*DENSE, LayerBlocks(AttentionLayout(), layout)), **changes)


def mixture(
    routing: Routing,
    fp8: Fp8Config | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kind: type[MixtureLayout] = MixtureLayout,
) -> MixtureOfExperts:
    """With a shared expert, and sizes that leave ragged FP8 blocks."""
    spec = spec_of(kind(routing, 160, 96), hidden_size=144)
    model = Decoder(spec, precision_policy(spec, fp8 or Fp8Config()), "train", dtype=dtype)
    model.random_init(0)
    block = list(model.decoder_layers())[1].mlp
    assert isinstance(block, MixtureOfExperts)
    if block.gate.e_score_correction_bias is not None:
        block.gate.e_score_correction_bias.data.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    return block


def inputs_of(tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(tokens, 144, generator=torch.Generator().manual_seed(seed)).to(dtype)


def added(addend: Tensor | ExpertSum) -> Tensor:
    """What the next norm adds to the residual stream."""
    assert isinstance(addend, ExpertSum)
    return combine_experts(*addend)


def routed_by_hand(logits: list[float], bias: list[float], routing: Routing) -> dict[int, float]:
    """A token's experts with their weights, in plain Python."""
    exponentials = torch.tensor(logits, dtype=torch.float64)
    scores = (exponentials.softmax(0) if routing.scoring == "softmax" else exponentials.sigmoid()).tolist()
    choice = [score + one for score, one in zip(scores, bias, strict=True)]
    size = routing.num_experts // routing.num_groups
    groups = [range(first, first + size) for first in range(0, routing.num_experts, size)]
    kept = sorted(groups, key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))[: routing.kept_groups]
    allowed = sorted(e for group in kept for e in group)
    chosen = sorted(sorted(allowed, key=lambda e: -choice[e])[: routing.top_k])
    total = sum(scores[e] for e in chosen) if routing.renormalise else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


@pytest.mark.parametrize("routing", [SOFTMAX, SIGMOID, replace(SOFTMAX, renormalise=False, top_k=6)])
def test_routes_are_those_of_the_formula(routing: Routing) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_TX = torch.randn(50, routing.num_experts, generator=generator) * 3
    bias_X = torch.randn(routing.num_experts, generator=generator) / 3 if routing.corrected else None
    routes = route(logits_TX, bias_X, routing)
    for logits, experts, weights in zip(logits_TX.tolist(), routes.expert_TS, routes.weight_TS, strict=True):
        want = routed_by_hand(logits, [0.0] * len(logits) if bias_X is None else bias_X.tolist(), routing)
        assert experts.tolist() == list(want)
        assert weights.tolist() == pytest.approx(list(want.values()), rel=1e-6)


def test_logits_of_a_router_are_never_rounded_to_bfloat16() -> None:
    gate, x_TE = mixture(SOFTMAX).gate, inputs_of(20, torch.bfloat16)
    torch.testing.assert_close(gate(x_TE).double(), x_TE.double() @ gate.weight.double().t(), rtol=1e-6, atol=1e-6)


def test_a_tie_goes_to_the_lowest_id() -> None:
    equal_TX = torch.zeros(3, 8)
    assert route(equal_TX[:, :6], None, SOFTMAX).expert_TS.tolist() == [[0, 1]] * 3
    assert route(equal_TX, torch.zeros(8), SIGMOID).expert_TS.tolist() == [[0, 1, 2]] * 3
    equal_TX[1, 5:] = 1.0
    assert route(equal_TX, torch.zeros(8), replace(SIGMOID, kept_groups=4)).expert_TS[1].tolist() == [5, 6, 7]


def test_what_is_not_finite_does_not_become_a_plausible_weight() -> None:
    logits_TX = torch.tensor([[0.0, torch.nan, 1.0, 2.0, 3.0, 4.0]])
    assert route(logits_TX, None, SOFTMAX).weight_TS.isnan().all()


@pytest.mark.parametrize(
    ("routing", "kind"), [(SOFTMAX, MixtureLayout), (SOFTMAX, GatedMixtureLayout), (SIGMOID, MixtureLayout)]
)
def test_values_and_gradients_are_those_of_the_formula_in_float64(routing: Routing, kind: type[MixtureLayout]) -> None:
    moe = mixture(routing, dtype=torch.float32, kind=kind)
    x_TE, upstream_TE = inputs_of(40, torch.float32).requires_grad_(), inputs_of(40, torch.float32, 1)
    out_TE = moe(x_TE, ROTARY, CONTEXT)
    out_TE.backward(upstream_TE)
    wide = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in moe.named_parameters()}
    wide_x_TE = x_TE.detach().double().requires_grad_()
    want_TE = written_out(wide_x_TE, wide, routing)
    want_TE.backward(upstream_TE.double())
    torch.testing.assert_close(out_TE.double(), want_TE, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x_TE.grad.double(), wide_x_TE.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in moe.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad.double(), wide[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def written_out(x_TE: Tensor, weights: dict[str, Tensor], routing: Routing) -> Tensor:
    """Every expert for every token, those that are not chosen times 0."""
    logits_TX = x_TE @ weights["gate.weight"].t()
    score_TX = logits_TX.softmax(1) if routing.scoring == "softmax" else logits_TX.sigmoid()
    bias_X = weights.get("gate.e_score_correction_bias")
    chosen_TS = route(logits_TX.detach().float(), None if bias_X is None else bias_X.float(), routing).expert_TS
    weight_TX = score_TX * torch.zeros_like(score_TX).scatter_(1, chosen_TS, 1.0)
    weight_TX = weight_TX / weight_TX.sum(1, keepdim=True) * routing.scale
    gate_ups = weights["experts.gate_up_proj.weight"].chunk(routing.num_experts)
    downs = weights["experts.down_proj.weight"].chunk(routing.num_experts)
    out_TE = gated(x_TE, weights["shared_experts.gate_up_proj.weight"], weights["shared_experts.down_proj.weight"])
    if "shared_expert_gate.weight" in weights:
        out_TE = out_TE * (x_TE @ weights["shared_expert_gate.weight"].t()).sigmoid()
    for weight_T, gate_up, down in zip(weight_TX.t(), gate_ups, downs, strict=True):
        out_TE = out_TE + weight_T[:, None] * gated(x_TE, gate_up, down)
    return out_TE


def gated(x_TE: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate_TF, up_TF = (x_TE @ gate_up.t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate_TF) * up_TF) @ down.t()


@FORMS
def test_a_token_is_the_same_alone_and_in_any_company(fp8: Fp8Config, kind: type[MixtureLayout]) -> None:
    """Alone; in reverse; among copies of itself, so that its experts are full and all others idle."""
    moe = mixture(SIGMOID, fp8, kind=kind)
    x_TE = inputs_of(33, torch.bfloat16)
    together_TE = moe(x_TE, ROTARY, CONTEXT)
    assert together_TE.unique(dim=0).shape[0] == 33
    assert torch.equal(moe(x_TE.flip(0), ROTARY, CONTEXT).flip(0), together_TE)
    for token in (0, 17):
        alone_1E = moe(x_TE[token : token + 1], ROTARY, CONTEXT)
        copies_TE = moe(x_TE[token].expand(150, -1), ROTARY, CONTEXT)
        assert torch.equal(alone_1E[0], together_TE[token])
        assert torch.equal(copies_TE, alone_1E.expand(150, -1))


def test_the_sum_of_experts_has_one_order_and_one_rounding() -> None:
    moe = mixture(SIGMOID)
    x_TE = inputs_of(20, torch.bfloat16)
    routes = moe.gate.routes(moe.gate(x_TE))
    groups = group_rows(routes.expert_TS, 8)
    y_PE = moe.experts.down_proj(torch.randn(60, 160).bfloat16(), groups)
    shared_TE = inputs_of(20, torch.bfloat16, 4)
    combined_TE = combine(y_PE, routes.weight_TS, shared_TE, groups)
    for token in range(20):
        sum_E = torch.zeros(144)
        for slot in range(3):
            sum_E = sum_E + routes.weight_TS[token, slot] * y_PE[groups.row_TS[token, slot]].float()
        assert torch.equal(combined_TE[token], (sum_E + shared_TE[token]).bfloat16())


def test_each_expert_has_fp8_blocks_of_its_own() -> None:
    """A size of 320 ends in the middle of a block, so the next expert would share it."""
    linear = mixture(SOFTMAX, FP8).experts.gate_up_proj
    assert isinstance(linear, Float8StackedLinear) and linear.weight is not None
    for expert, weight_NK in enumerate(linear.weight.detach().chunk(6)):
        want = quantize_weight_reference(weight_NK)
        held = linear.of_expert(linear.quantized, expert)
        assert torch.equal(held.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(held.scale, want.scale)


@FORMS
def test_the_fused_forms_are_the_module(
    fp8: Fp8Config, kind: type[MixtureLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp_training, "silu_mul_triton", silu_mul_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_backward_triton", silu_mul_backward_reference)
    moe = mixture(SIGMOID, fp8, kind=kind)
    x_TE, upstream_TE = inputs_of(25, torch.bfloat16), inputs_of(25, torch.bfloat16, 1)
    leaf_TE = x_TE.clone().requires_grad_()
    out_TE = moe(leaf_TE, ROTARY, CONTEXT)
    out_TE.backward(upstream_TE)
    rollout_inputs = RolloutInputs(RotaryTable(16, 1e4, None, 8, device="cpu"), torch.zeros(1, dtype=torch.int64), None)
    gradients: dict[str, Tensor | None] = {}
    with torch.no_grad():
        assert torch.equal(added(moe.rollout(x_TE, rollout_inputs)), out_TE)
        saved = moe.begin(Input(x_TE, x_TE), TrainingInputs(ROTARY, CONTEXT), costly=None, observe=True)
        assert torch.equal(moe.finish(saved), out_TE)
        dx_TE = moe.backward(saved, upstream_TE, gradients)
    trained = {name: p.grad for name, p in moe.named_parameters() if p.requires_grad}
    assert gradients.keys() == trained.keys()
    assert relative_error(dx_TE, leaf_TE.grad) < (0.12 if fp8.train else 0.02)
    for name, want in trained.items():
        if "shared_experts" in name:
            assert relative_error(gradients[name], want) < (0.12 if fp8.train else 0.02), name
        else:
            assert torch.equal(gradients[name], want), name


@pytest.mark.parametrize(
    ("lora", "shared_size", "reads"),
    [
        (None, 256, True),
        (None, 0, True),
        (LoraConfig(rank=8), 256, True),  # of the shared expert alone
        (LoraConfig(rank=8, experts=True, targets=("down_proj",)), 256, True),  # the shared expert reads them
        (LoraConfig(rank=8, experts=True), 256, False),
        (LoraConfig(rank=8, experts=True), 0, False),
    ],
)
def test_a_rollouts_experts_read_the_codes_of_the_norm_in_front(
    lora: LoraConfig | None, shared_size: int, reads: bool
) -> None:
    """They are the codes that each would quantise for itself. An adapter reads the values, and so does the router. The
    sum is that of the separate ops, with the branches of the experts' adapters."""
    spec = spec_of(MixtureLayout(SIGMOID, 128, shared_size), hidden_size=128)
    model = Decoder(spec, precision_policy(spec, FP8), "train", backend="scaled_mm", lora=lora)
    model.random_init(0)
    model.draw_adapters(1)
    for _, adapter in model.adapters():
        torch.nn.init.normal_(adapter.b, std=0.3, generator=torch.Generator().manual_seed(2))
    layer = list(model.decoder_layers())[1]
    moe = layer.mlp
    assert isinstance(moe, MixtureOfExperts)
    inputs = RolloutInputs(RotaryTable(16, 1e4, None, 8, device="cpu"), torch.zeros(1, dtype=torch.int64), None)
    with torch.no_grad():
        _, x = add_norm(None, inputs_of(9, torch.bfloat16)[:, :128].contiguous(), layer.mlp_norm, moe)
        assert isinstance(x, BothForms) == reads
        alone_TE = added(moe.rollout(values_of(x), inputs))
        assert torch.equal(added(moe.rollout(x, inputs)), alone_TE)
        shared = moe.shared_experts
        shared_TE = None if shared is None else shared.rollout(values_of(x), inputs)
        assert torch.equal(moe.mix(values_of(x), shared_TE), alone_TE)
        both = BothForms(values_of(x), quantize_activation_reference(2 * values_of(x)))
        assert torch.equal(added(moe.rollout(both, inputs)), alone_TE) != reads


def test_policy_memory_and_adapters_follow_from_the_layout() -> None:
    spec = spec_of(MixtureLayout(SIGMOID, 128, 256), hidden_size=128)
    lora = LoraConfig(rank=4, targets=("q_proj", "down_proj"))
    model = Decoder(spec, precision_policy(spec, FP8), "train", lora=lora)
    kinds = precision_policy(spec, Fp8Config(train=True, ignore=("*.experts.*",))).kinds()
    assert {name: linears[-1].train for name, linears in kinds.items() if "experts" in name} == {
        "mlp.experts.gate_up_proj": "bf16",
        "mlp.experts.down_proj": "bf16",
        "mlp.shared_experts.gate_up_proj": "fp8",
        "mlp.shared_experts.down_proj": "fp8",
    }
    adapters = [p for name, p in model.named_parameters() if ".lora." in name]
    assert adapter_elements(spec, lora) == sum(p.numel() for p in adapters), "experts have none"
    assert spec.num_parameters == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in adapters)
    names = [name for name, _ in spec.linears()]
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}})
    estimate = estimate_memory(recipe, spec, Precisions(names, names, ("K", "V")), on_gpu=True, device_bytes=None)
    codes = sum(linear.codes.nbytes for _, linear in model.float8_linears())
    sizes = {part.name: part.num_bytes for part in estimate.parts}
    assert sizes["weights"] == 2 * spec.num_parameters
    assert sizes["FP8 copies"] == pytest.approx(2 * codes, rel=1e-3), "codes both ways; scales are 4 bytes of 16,384"


def test_experts_start_as_wide_as_other_linears() -> None:
    """By the width of their input, although all experts are one parameter."""
    spec = spec_of(MixtureLayout(SIGMOID, 160, 96), hidden_size=144)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(0)
    inputs = {"experts.gate_up_proj": 144, "experts.down_proj": 160, "shared_experts.down_proj": 96, "gate": 144}
    for name, width in inputs.items():
        found = model.get_parameter(f"layers.1.mlp.{name}.weight").float().std()
        assert found.item() == pytest.approx(width**-0.5, rel=0.1), name


def test_the_correction_bias_is_not_the_optimizers() -> None:
    spec = spec_of(MixtureLayout(SIGMOID, 48))
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    name = "layers.1.mlp.gate.e_score_correction_bias"
    assert model.get_parameter(name).dtype == torch.float32
    assert set(dict(model.named_parameters())) - set(dict(model.trained_parameters())) == {name}


def test_router_losses_are_those_of_the_formulas() -> None:
    """Against autograd in float64, with half of the step's tokens in this micro-batch."""
    logits_TX = torch.randn(30, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    record = RouterRecord(balance_loss=0.3, z_loss=0.2, share=0.5)
    routes = route(logits_TX, None, SOFTMAX)
    groups = group_rows(routes.expert_TS, 6)
    weight_TS = record.observe(4, logits_TX, routes.score_TX, groups.load_X, routes.weight_TS)
    assert torch.equal(weight_TS, routes.weight_TS)
    weight_TS.backward(torch.zeros_like(weight_TS))
    wide_TX = logits_TX.detach().double().requires_grad_()
    chosen_TX = torch.zeros(30, 6, dtype=torch.float64).scatter_(1, routes.expert_TS, 1.0)
    balance = 6 * (chosen_TX.mean(0) / 2 * wide_TX.softmax(1).mean(0)).sum()
    (0.5 * (0.3 * balance + 0.2 * wide_TX.logsumexp(1).square().mean())).backward()
    assert logits_TX.grad is not None and wide_TX.grad is not None
    torch.testing.assert_close(logits_TX.grad.double(), wide_TX.grad, rtol=1e-5, atol=1e-8)
    assert record.loads[4].tolist() == chosen_TX.sum(0).tolist()
    entropy_T = -(wide_TX.softmax(1) * wide_TX.log_softmax(1)).sum(1)
    torch.testing.assert_close(record.entropies[4], entropy_T.detach().float())


def test_correction_biases_move_towards_a_balanced_load() -> None:
    spec = spec_of(MixtureLayout(replace(SIGMOID, num_experts=4, num_groups=1, kept_groups=1), 48))
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(0)
    routers, means = Routers(model, RouterConfig(bias_rate=0.5)), MetricMeans()
    for load in ([9, 3, 0, 0], [9, 0, 0, 3]):
        record = RouterRecord(loads={1: torch.tensor(load)}, entropies={1: torch.ones(4)})
        routers.add(record, means)
    routers.finish_step()
    assert model.get_parameter("layers.1.mlp.gate.e_score_correction_bias").tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert routers.metrics() == {"router/load_max_over_mean": 3.0, "router/idle_experts": 1.0}
    routers.begin_call()
    assert routers.metrics() == {}


def test_a_refreshed_reference_has_the_moved_correction_biases() -> None:
    spec = spec_of(MixtureLayout(replace(SIGMOID, num_experts=4, num_groups=1, kept_groups=1), 48))
    policy, model = (Decoder(spec, precision_policy(spec, Fp8Config()), "train") for _ in range(2))
    for one in (policy, model):
        one.random_init(0)
    reference = Reference(model, build_algorithm(objective(kl_coefficient=0.1, reference_every=2)))
    name = "layers.1.mlp.gate.e_score_correction_bias"
    policy.get_parameter(name).data.fill_(0.25)
    reference.follow(policy, 1, None)
    assert not model.get_parameter(name).any(), "not due yet"
    reference.follow(policy, 2, None)
    assert (model.get_parameter(name) == 0.25).all()
    assert f"reference.{name}" in reference.state(), "a resumed run has it as well"


# ---------------------------------------------------------------- experts as one node


EXPERTS, CHOSEN, HIDDEN, INNER = 6, 2, 256, 128
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": (StackedLinear, {}),
    "emulated": (Float8StackedLinear, {"backend": "emulated"}),
    "codes": (Float8StackedLinear, {"backend": "scaled_mm"}),  # on a CPU the references read the codes of a GPU
    "powers": (Float8StackedLinear, {"backend": "scaled_mm", "power_of_two": True}),
}


def saved_elements(forward: Any) -> tuple[Tensor, int]:
    """The result, and how many activations the graph keeps."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out: Tensor = forward()
    return out, sum(sizes.values())


@pytest.mark.parametrize("name", KINDS)
def test_the_bits_are_those_of_the_separate_ops(name: str) -> None:
    kind, options = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    gate_up, down = kind(HIDDEN, 2 * INNER, EXPERTS, **options), kind(INNER, HIDDEN, EXPERTS, **options)
    for linear in (gate_up, down):
        torch.nn.init.normal_(linear.weight, std=0.1, generator=generator)
        if isinstance(linear, Float8StackedLinear):
            linear.requantize()
    expert_TS = torch.rand(37, EXPERTS - 1, generator=generator).topk(CHOSEN).indices.sort(1).values
    groups = group_rows(expert_TS, EXPERTS)  # the last expert has no row
    x_TE = torch.randn(37, HIDDEN, generator=generator).bfloat16().requires_grad_()
    upstream_PE = torch.randn(37 * CHOSEN, HIDDEN, generator=generator).bfloat16()
    ways = (
        lambda: run_experts(x_TE, groups, gate_up, down).down_PE,
        lambda: down(silu_mul(gate_up(gather(x_TE, groups), groups)), groups),
    )
    found, kept = [], []
    for way in ways:
        out_PE, elements = saved_elements(way)
        kept.append(elements)
        found.append([out_PE, *torch.autograd.grad(out_PE, [x_TE, gate_up.weight, down.weight], upstream_PE)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(bool(one.any()) for one in found[0])
    rows = 37 * CHOSEN
    assert kept == [37 * HIDDEN + rows * 2 * INNER, rows * (HIDDEN + 3 * INNER)]


def test_stale_codes_are_refused() -> None:
    gate_up, down = (Float8StackedLinear(HIDDEN, HIDDEN, EXPERTS) for _ in range(2))
    groups = group_rows(torch.tensor([[0, 1]]), EXPERTS)
    with pytest.raises(RuntimeError, match="never quantised"):
        run_experts(torch.zeros(1, HIDDEN).bfloat16(), groups, gate_up, down)
