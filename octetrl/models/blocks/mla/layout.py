"""Multi-head latent attention's layout: projections of queries and output, and the latents' matrices. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    CachedTensor,
    LinearLayout,
    MatrixLayout,
    PairProducts,
    Part,
    Peak,
    TensorLayout,
    TrainedAs,
    VectorLayout,
)
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES, ModelSizes, ordinary_head_size

ABSORBED = "latent attention multiplies queries and outputs by it, never a latent, so a branch has no place"


@dataclass(frozen=True, slots=True)
class LatentAttentionLayout(BlockLayout):
    """Sizes of one head; the latent and the rotary key are shared by all heads. `ModelSpec.head_size` is nope + rotary.

    `query_latent_size` 0: queries have one projection. `interleaved`: RoPE pairs neighbours (kernels/rows/rope.py).
    """

    latent_size: int  # kv_lora_rank
    query_latent_size: int  # q_lora_rank
    nope_size: int  # of a query's part without RoPE
    rope_size: int
    value_size: int
    interleaved: bool = True

    sites = (
        "q_a_proj",
        "q_proj",
        "kv_a_proj",
        "rotated q",
        "absorbed q",
        "latent as cached",
        "rotary key as cached",
        "latent out",
        "attention out",
        "o_proj",
    )

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        heads, hidden, latent = spec.num_heads, spec.hidden_size, self.latent_size
        up = heads * (self.nope_size + self.value_size)
        return (
            *self._of_queries(spec),
            MatrixLayout("kv_a_proj_with_mqa.weight", latent + self.rope_size, hidden, adaptable=True),
            VectorLayout("kv_a_layernorm.weight", latent),
            MatrixLayout("kv_b_proj.weight", up, latent, why_not_adapted=ABSORBED),
            LinearLayout("o_proj", heads * self.value_size, (Part("o_proj", hidden),)),
        )

    def _of_queries(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        rank = self.query_latent_size
        if not rank:
            return (LinearLayout("q_proj", spec.hidden_size, (Part("q_proj", spec.q_size),)),)
        return (
            LinearLayout("q_a_proj", spec.hidden_size, (Part("q_a_proj", rank),)),
            VectorLayout("q_a_layernorm.weight", rank),
            LinearLayout("q_b_proj", rank, (Part("q_b_proj", spec.q_size),)),
        )

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved: queries, their latents, and the latent before its norm. Costly: the output of every head.

        The backward's peak has queries, keys, values, output and the gradients of all, each padded to one head size:
        the most that any sizes of a head need.
        """
        b, heads, hidden = how.value_bytes, spec.num_heads, spec.hidden_size
        latents = self.latent_size + self.rope_size
        up = heads * (self.nope_size + self.value_size)
        padded = heads * ordinary_head_size(max(spec.head_size, self.value_size))
        matrices = sum(tensor.num_parameters for tensor in self.tensors(spec))
        return BlockMemory(
            saved=b * (spec.q_size + self.query_latent_size + latents),
            costly=b * heads * self.value_size,
            peaks=(
                Peak(b * heads * (2 * self.latent_size + self.rope_size)),  # running the forward again
                Peak(b * (8 * padded + 2 * up + 2 * latents + hidden), 0 if how.frozen else b * matrices),
            ),
            of_weights=0 if how.frozen else b * matrices,
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        of_queries = {"q_lora_rank": self.query_latent_size} if self.query_latent_size else {}
        values = spec.num_heads * self.value_size
        return {"query size (heads * head size)": spec.q_size, "value size (heads * v_head_dim)": values, **of_queries}

    def cached(self, spec: ModelSizes) -> tuple[CachedTensor, ...]:
        """The latent after its norm, and the rotated key; both shared by all heads."""
        return (
            CachedTensor("latent", (self.latent_size,), (1,), scale_of="scale", calibrates=False),
            CachedTensor("rotary key", (self.rope_size,), never_fp8="it is small and decides positions"),
        )

    def rotary_size(self, spec: ModelSizes) -> int:
        return self.rope_size

    def pair_products(self, spec: ModelSizes) -> PairProducts:
        """Needed: that of keys and values of every head. Computed: the absorbed forward, and a backward that computes
        scores and dP three times (kernels/attention/latent_backward.py)."""
        query, value = spec.head_size, self.value_size
        absorbed = 2 * self.latent_size + self.rope_size
        return PairProducts(
            spec.num_heads * (4 * query + 3 * value), spec.num_heads * (absorbed + 5 * query + 4 * value)
        )

    def refused_on_gpu(self) -> str | None:
        widest, most = max(self.nope_size + self.rope_size, self.value_size), max(SUPPORTED_HEAD_SIZES)
        if not (self.nope_size % 64 or self.latent_size % 8 or self.value_size % 8 or widest > most):
            return None
        return (
            f"latent attention with qk_nope_head_dim {self.nope_size}, qk_rope_head_dim {self.rope_size}, kv_lora_rank"
            f" {self.latent_size} and v_head_dim {self.value_size} does not run on a GPU: the first must be a multiple"
            f" of 64, the last two of 8, and a head has at most {most} elements; set cluster.device=cpu"
        )
