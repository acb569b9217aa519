"""The table of families in docs/models.md, from the registry: `python -m lab.families_page` rewrites it.

A family has our blocks (family.py), or transformers' modules compute its layers and a test has shown equal bits
(`PROVEN` of fp8/parity.py). What of its KV cache may be FP8, and whether a GPU runs it, the layouts of a small model of
the family say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from octetrl.fp8.parity import PROVEN
from octetrl.models.families import spec_from_config
from octetrl.models.family import FAMILIES
from octetrl.models.text_part import OUTER_ENDING

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: made by `make schema` -->", "<!-- end of families -->"
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "pad_token_id": 0,
}  # fmt: skip


class Known(NamedTuple):
    models: str
    remark: str = ""


KNOWN = {
    "llama": Known("Llama 3.x, SmolLM2, others with its layers", "`attention_bias`; no `mlp_bias`"),
    "mistral": Known("Mistral 7B, Nemo", "a window in every layer; 4,096 if the key is missing"),
    "mixtral": Known("Mixtral 8x7B, 8x22B", "mixture; one window in every layer"),
    "phi3": Known(
        "Phi-3 (4k), Phi-4",
        "one window; files have `qkv_proj` and `gate_up_proj`, also as LoRA targets; no RoPE scaling",
    ),
    "qwen2": Known("Qwen2, Qwen2.5", "biases of q, k, v; windows by `layer_types` or `max_window_layers`"),
    "qwen3": Known("Qwen3", "QK-norm, `attention_bias`; windows as Qwen2"),
    "qwen3_vl_text": Known("Qwen3-VL, dense", "its text's part; an export has the part for images as it was"),
    "qwen2_moe": Known("Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "mixture whose shared expert has a gate; no windows"),
    "qwen3_moe": Known("Qwen3-30B-A3B, -235B-A22B", "mixture ([fp8.md](fp8.md), §11); one window in every layer"),
    "dots1": Known("dots.llm1", "mixture with DeepSeek-V3's routing; windows as Qwen2"),
    "glm4_moe": Known(
        "GLM-4.5, GLM-4.5-Air",
        "mixture with DeepSeek-V3's routing; RoPE on half of each head; QK-norm if `use_qk_norm` is true",
    ),
    "gpt_oss": Known("gpt-oss-20b, -120b", "mixture; sinks, a window in every second layer; [below](#gpt-oss)"),
    "deepseek_v3": Known("Moonlight, DeepSeek-V3, Kimi K2", "mixture with latent attention (MLA)"),
    "glm4_moe_lite": Known("GLM-4.7-Flash", "as DeepSeek-V3"),
    "qwen3_next": Known("Qwen3-Next-80B-A3B", "mixture; [linear attention](#linear-attention), attention with a gate"),
    "qwen3_5_text": Known("Qwen3.5, 3.6, 3.8, dense", "as Qwen3-Next; of a model that reads images, its text's part"),
    "qwen3_5_moe_text": Known("Qwen3.5-35B-A3B", "the same, a mixture"),
    "arcee": Known("AFM-4.5B"),
    "cohere": Known("Command R"),
    "cohere2": Known("Command R7B, Command A"),
    "ernie4_5": Known("ERNIE 4.5, dense"),
    "exaone4": Known("EXAONE 4"),
    "gemma": Known("Gemma"),
    "gemma3_text": Known("Gemma 3, text"),
    "glm4": Known("GLM-4-0414"),
    "granite": Known("Granite 3, dense"),
    "olmo2": Known("OLMo 2"),
    "olmo3": Known("OLMo 3"),
    "seed_oss": Known("Seed-OSS"),
    "smollm3": Known("SmolLM3"),
}


def table() -> Iterator[str]:
    """Its lines."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as THEIRS  # takes a second

    yield "| architecture | models | layers | FP8 cache | remarks |"
    yield "|---|---|---|---|---|"
    for family in FAMILIES.values():
        around = [f"{family.class_name}{OUTER_ENDING}"] if family.outer else []
        alone = [family.architecture] if family.architecture in THEIRS.values() else []
        yield _row([*alone, *around], family.name, "ours")
    for name in PROVEN:
        yield _row([str(THEIRS[name])], name, "transformers'")


def _row(architectures: list[str], name: str, layers: str) -> str:
    spec = spec_from_config(SMALL | {"model_type": name})
    tensors = [tensor for block in spec.distinct_blocks for tensor in block.cached(spec)]
    cached = dict.fromkeys(tensor.name for tensor in tensors if tensor.never_fp8 is None)
    named, known = ", ".join(f"`{one}`" for one in architectures), KNOWN[name]
    return f"| {' | '.join([named, known.models, layers, ', '.join(cached), known.remark])} |"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    own = "\n".join([BEGIN, *table(), END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: own, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
