"""The layout of a mixture: router, stacked linears of all experts, and shared expert. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    LinearLayout,
    MatrixLayout,
    Part,
    Peak,
    StackedLinearLayout,
    TensorLayout,
    TrainedAs,
    VectorLayout,
)
from octetrl.shapes.sizes import ModelSizes

Scoring = Literal["softmax", "sigmoid"]
BIAS = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted (routing.py)."""

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalise: bool  # the chosen experts' weights sum to 1
    corrected: bool = False  # chosen by score + e_score_correction_bias, weighted by score ("noaux_tc")
    num_groups: int = 1  # of experts with consecutive ids
    kept_groups: int = 1  # the experts are chosen from these
    scale: float = 1.0  # of the weights


@dataclass(frozen=True, slots=True)
class MixtureLayout(BlockLayout):
    """`expert_size` and `shared_size` are intermediate sizes. `shared_size` 0: no shared expert."""

    routing: Routing
    expert_size: int
    shared_size: int = 0

    sites: ClassVar[tuple[str, ...]] = (
        "router logits",
        "chosen experts",
        "routing weights",
        "experts' gate_up_proj",
        "experts' SiLU",
        "experts' down_proj",
        "gate_up_proj",  # these three are the shared expert's
        "SiLU",
        "down_proj",
        "sum of experts",
    )

    has_biases: ClassVar[bool] = False  # of router and experts
    clamped: ClassVar[bool] = False  # the activation is kernels/rows/clamped_glu.py instead of SiLU
    shared_name: ClassVar[str] = "shared_experts"  # in a checkpoint
    shared_gate: ClassVar[bool] = False  # the shared expert's output is multiplied by a sigmoid
    gate_up_names: ClassVar[tuple[str, str]] = ("gate_proj", "up_proj")  # of an expert's matrices in a checkpoint
    down_name: ClassVar[str] = "down_proj"

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        count, hidden, inner = self.routing.num_experts, spec.hidden_size, self.expert_size
        chosen, down = self.routing.top_k, (Part(self.down_name, hidden),)
        gate_up = tuple(Part(name, inner) for name in self.gate_up_names)
        bias = (VectorLayout(BIAS, count, has_gradient=False),) if self.routing.corrected else ()
        return (
            MatrixLayout("gate.weight", count, hidden),
            *bias,
            StackedLinearLayout("experts.gate_up_proj", hidden, gate_up, count=count, per_token=chosen),
            StackedLinearLayout("experts.down_proj", inner, down, count=count, per_token=chosen),
            *self._shared_tensors(spec),
        )

    def _shared_tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        inner, hidden = self.shared_size, spec.hidden_size
        if not inner:
            return ()
        gate_up, down = (Part("gate_proj", inner), Part("up_proj", inner)), (Part("down_proj", hidden),)
        gate = (MatrixLayout("shared_expert_gate.weight", 1, hidden),) if self.shared_gate else ()
        return (
            LinearLayout("shared_experts.gate_up_proj", hidden, gate_up, hf_submodule=self.shared_name),
            LinearLayout("shared_experts.down_proj", inner, down, hf_submodule=self.shared_name),
            *gate,
        )

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved, for each of a token's experts: gate and up, the output's row; beside adapters also the input's row and
        the product of gate and up."""
        b, hidden = how.value_bytes, spec.hidden_size
        of_shared = 3 * self.shared_size
        experts = self.routing.top_k * (2 * hidden + 3 * self.expert_size) + of_shared
        shared_output = hidden if self.shared_gate else 0
        saved = experts if how.frozen else self.routing.top_k * (hidden + 2 * self.expert_size) + of_shared
        router = 4 * 4 * self.routing.num_experts  # logits, scores, and their gradients
        num_weights = sum(linear.num_weights for linear in self.linears(spec))
        of_weights = 0 if how.frozen else b * (num_weights + self.routing.num_experts * hidden)
        return BlockMemory(
            saved=b * (saved + hidden + shared_output) + router,
            peaks=(Peak(b * (experts + 2 * shared_output) + 8 * hidden + router, of_weights),),
            of_weights=of_weights,
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        shared = {"shared expert's intermediate size": self.shared_size} if self.shared_size else {}
        return {"experts' intermediate size": self.expert_size, **shared}


@dataclass(frozen=True, slots=True)
class MixtralLayout(MixtureLayout):
    """The same with Mixtral's names in a checkpoint."""

    hf_name = "block_sparse_moe"
    gate_up_names = ("w1", "w3")
    down_name = "w2"


@dataclass(frozen=True, slots=True)
class GptOssMixtureLayout(MixtureLayout):
    """gpt-oss's, with one tensor for the matrices of all experts. Published weights are MXFP4."""

    has_biases = True
    clamped = True

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        _, gate_up, down = MixtureLayout.tensors(self, spec)
        assert isinstance(gate_up, StackedLinearLayout) and isinstance(down, StackedLinearLayout)
        count = self.routing.num_experts
        return (
            MatrixLayout("gate.weight", count, spec.hidden_size, hf_name="router.weight"),
            VectorLayout("gate.bias", count, hf_name="router.bias"),
            replace(gate_up, bias=True, files="turned"),
            replace(down, bias=True, files="turned"),
        )


@dataclass(frozen=True, slots=True)
class GatedMixtureLayout(MixtureLayout):
    """Qwen2-MoE's: a token also decides how much of the shared expert it takes."""

    sites = (*MixtureLayout.sites, "gated shared expert")
    shared_name = "shared_expert"
    shared_gate = True


@dataclass(frozen=True, slots=True)
class StackedMixtureLayout(GatedMixtureLayout):
    """Qwen3.5's: in a checkpoint the matrices of all experts are one tensor."""

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        stacked = StackedLinearLayout
        own = GatedMixtureLayout.tensors(self, spec)
        return tuple(replace(one, files="stacked") if isinstance(one, stacked) else one for one in own)
