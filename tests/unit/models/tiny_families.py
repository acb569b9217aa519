"""One small random model of each family, ours and transformers', for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
QWEN2_SHAPE = {**{key: value for key, value in SHAPE.items() if key != "head_dim"}, "num_attention_heads": 2}
FAMILIES = ("llama-tied", "llama", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")


def hf_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model of transformers, `changes` to its shape; norms and biases random too, so that a forgotten one
    shows."""
    torch.manual_seed(seed)
    family, _, tied = name.partition("-")
    settings = {"tie_word_embeddings": bool(tied), "attn_implementation": "eager"}
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}, **settings, rope_parameters=LLAMA3_ROPE))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(**{**QWEN2_SHAPE, "num_key_value_heads": 1, **changes}, **settings, rope_parameters=ROPE)
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes}, **settings, rope_parameters=ROPE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def decoder_of(folder: Path, fp8: Fp8Config | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with the weights of a Hugging Face folder."""
    spec = load_spec(folder)
    model = Decoder(spec, precision_policy(spec, fp8 or Fp8Config()), "train", dtype=dtype)
    load_weights(model, folder)
    return model


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, PackedContext]:
    """Random tokens, positions and context of sequences of these lengths, end to end."""
    token_ids_T = torch.randint(SHAPE["vocab_size"], (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens_B1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return token_ids_T, positions_T, PackedContext(cu_seqlens_B1, max(lengths))


def hf_logits(model: PreTrainedModel, token_ids_T: Tensor, lengths: list[int]) -> Tensor:
    """transformers' logits of each sequence run by itself, end to end."""
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in token_ids_T.split(lengths)])


def assert_transformers_reads_it_as_we_do(folder: Path, ours: Decoder, scratch: Path) -> None:
    """`folder` is a block-FP8 export and `ours` what we read from it; `scratch` gets its weights in BF16."""
    save_weights(ours, scratch)
    fp8, bf16 = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16) for one in (folder, scratch))
    wanted = bf16.state_dict()
    for name, value in fp8.state_dict().items():
        assert torch.equal(value, wanted[name]), name
