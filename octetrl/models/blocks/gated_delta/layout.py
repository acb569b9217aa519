"""The layout of linear attention by the gated delta rule (arXiv:2412.06464; Qwen3-Next, Qwen3.5). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    LinearLayout,
    MatrixLayout,
    Part,
    Peak,
    TensorLayout,
    TrainedAs,
    VectorLayout,
)
from octetrl.shapes.delta_rule import CHUNK, DeltaShape
from octetrl.shapes.sizes import ModelSizes

FIRST_DECAY = -2.0  # A_log of a new model: with dt_bias 1, a token keeps about 0.84 of the state
CONV_ON_CPU = 13  # float32 values of a channel in the plain backward of the convolution, with four taps
HEAD_SIZE = 128  # of the kernels; published models have no other


@dataclass(frozen=True, slots=True)
class GatedDeltaLayout(BlockLayout):
    """`grouped`: files have one projection of q, k, v and z and one of b and a, whose rows are grouped by key head. The
    parameters keep that order; what they give is put in order in the forward."""

    shape: DeltaShape
    grouped: bool = False

    hf_name = "linear_attn"
    sites = (
        "in_proj",
        "decay",
        "update rate",
        "q of the rule",
        "k of the rule",
        "v of the rule",
        "delta rule",
        "gated norm",
        "out_proj",
    )

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        heads, channels, hidden = self.shape.value_heads, self.shape.channels, spec.hidden_size
        parts: tuple[Part, ...] = Part("in_proj_qkv", channels), Part("in_proj_z", self.value_width)
        small = MatrixLayout("in_proj_b.weight", heads, hidden), MatrixLayout("in_proj_a.weight", heads, hidden)
        if self.grouped:
            parts = (Part("in_proj_qkvz", channels + self.value_width),)
            small = (MatrixLayout("in_proj_ba.weight", 2 * heads, hidden),)  # type: ignore[assignment]
        return (
            VectorLayout("dt_bias", heads, starts_at=1.0),
            VectorLayout("A_log", heads, starts_at=FIRST_DECAY),
            MatrixLayout("conv1d.weight", channels, self.shape.taps, is_convolution=True),
            LinearLayout("in_proj_qkvz", hidden, parts),
            *small,
            VectorLayout("norm.weight", self.shape.value_size, starts_at=1.0),
            LinearLayout("out_proj", self.value_width, (Part("out_proj", hidden),)),
        )

    @property
    def value_width(self) -> int:
        """Values of all heads together."""
        return self.shape.value_heads * self.shape.value_size

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved: what the projections give. Costly: the rule's output. The backward's peak, in the rule, has q, k, v,
        their gradients and those of qkv, four tensors like v, and for each chunk its state, the state's gradient and
        three tiles of a row for each of its rows (kernels/delta_rule/delta_rule_packed_backward.py). On a CPU it has q,
        k, v, the gradients of the output and z, and what the plain forms compute in float32."""
        b, channels, values = how.value_bytes, self.shape.channels, self.value_width
        small = 4 * 4 * self.shape.value_heads  # b, a, and their gradients
        weights = 0 if how.frozen else b * sum(linear.num_weights for linear in self.linears(spec))
        saved = b * (channels + values) + small
        chunks = 2 * values * self.shape.key_size / CHUNK + 3 * self.shape.value_heads * CHUNK
        peak = b * spec.hidden_size + saved + b * (3 * channels + 4 * values + chunks)
        if not how.on_gpu:
            peak = b * (channels + 2 * values) + 4 * max(self._rule_on_cpu(), CONV_ON_CPU * channels)
        return BlockMemory(
            saved=saved,
            costly=b * values,
            made_with_costly=b * channels + small / 2,
            peaks=(Peak(peak, weights),),
            of_weights=weights,
        )

    def _rule_on_cpu(self) -> float:
        """Float32 values of a token in the plain backward of the rule, of one sequence: of each value head 13 tiles of
        a row, six tensors like k and eight like v, and of each chunk six like its state."""
        shape = self.shape
        rows = 13 * CHUNK + 6 * shape.key_size + 8 * shape.value_size
        return shape.value_heads * (rows + 6 * shape.key_size * shape.value_size / CHUNK)

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        shape = self.shape
        return {
            "key size (linear_num_key_heads * linear_key_head_dim)": shape.key_heads * shape.key_size,
            "value size (linear_num_value_heads * linear_value_head_dim)": self.value_width,
        }

    def state_bytes(self, spec: ModelSizes, value_bytes: int, most_rows: int) -> int:
        return self.shape.slot_bytes(self.shape.conv_rows(most_rows), value_bytes)

    def refused_on_gpu(self) -> str | None:
        sizes = self.shape.key_size, self.shape.value_size
        if sizes == (HEAD_SIZE, HEAD_SIZE):
            return None
        return (
            f"linear attention with linear_key_head_dim {sizes[0]} and linear_value_head_dim {sizes[1]} does not run on"
            f" a GPU, only heads of {HEAD_SIZE} do; set cluster.device=cpu"
        )
