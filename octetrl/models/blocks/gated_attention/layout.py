"""The layout of attention whose output has a gate for each of its values (Qwen3-Next, Qwen3.5). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.shapes.blocks import BlockMemory, LinearLayout, Part, TrainedAs, VectorLayout
from octetrl.shapes.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class GatedAttentionLayout(AttentionLayout):
    """A head of q_proj has its query first and then its gate, as in a checkpoint."""

    sites = ("qkv_proj", *AttentionLayout.sites[1:-1], "gated attention", "o_proj")
    can_be_cut = False

    def tensors(self, spec: ModelSizes) -> tuple[LinearLayout | VectorLayout, ...]:
        qkv, *others = AttentionLayout.tensors(self, spec)
        assert isinstance(qkv, LinearLayout) and qkv.parts[0].name == "q_proj", "these files have q, k and v apart"
        parts = Part("q_proj", 2 * spec.q_size), *qkv.parts[1:]
        return (LinearLayout("qkv_proj", spec.hidden_size, parts, qkv.bias), *others)

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved also: the gates. Costly also: the output after its gate."""
        plain, gates = AttentionLayout.memory(self, spec, how), how.value_bytes * spec.q_size
        weights = 0 if how.frozen else how.value_bytes * spec.hidden_size * spec.q_size
        return BlockMemory(
            saved=plain.saved + gates,
            costly=plain.costly + gates,
            made_with_costly=plain.made_with_costly,
            peaks=tuple(peak._replace(per_token=peak.per_token + 4 * gates) for peak in plain.peaks),
            of_weights=plain.of_weights + weights,
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return AttentionLayout.sizes(self, spec)
