"""The gated MLP's layout: gate and up as one linear, and down. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octetrl.shapes.blocks import SCALED, BlockLayout, BlockMemory, LinearLayout, Part, Peak, TrainedAs
from octetrl.shapes.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class MLPLayout(BlockLayout):
    """The width is `ModelSpec.intermediate_size`."""

    sites = ("gate_up_proj", "SiLU", "down_proj")
    can_be_cut = True

    def tensors(self, spec: ModelSizes) -> tuple[LinearLayout, ...]:
        inner, cut = spec.intermediate_size, spec.tensor.size
        separate = Part("gate_proj", inner), Part("up_proj", inner)
        gate_up = (Part("gate_up_proj", 2 * inner),) if spec.fused_files else separate
        return (
            LinearLayout("gate_up_proj", spec.hidden_size, gate_up),
            LinearLayout("down_proj", cut * inner, (Part("down_proj", spec.hidden_size // cut),), joins=True),
        )

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved: gate and up."""
        b, hidden, inner = how.value_bytes, spec.hidden_size, spec.intermediate_size
        dgate_up = (4 * SCALED if how.fp8 else 2 * b) * inner
        if how.fp8 and how.frozen:
            dgate_up = (2 * b + 2 * SCALED) * inner
        dy, y = b * inner, how.operand_bytes * inner
        of_weights = 0 if how.frozen else b * sum(linear.num_weights for linear in self.linears(spec))
        return BlockMemory(
            saved=2 * b * inner,
            # After SiLU's backward, and after the last wgrad.
            peaks=(Peak(how.gradient_bytes * hidden + dy + dgate_up + y), Peak(b * hidden + dgate_up, of_weights)),
            of_weights=of_weights,
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return {"intermediate size": spec.intermediate_size}
