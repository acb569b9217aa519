"""A dense model's forward in float64, written out, with places where values may be replaced by quantised ones.

It reads a Hugging Face folder by the package's loader and shares nothing else with the package's forwards. Without
replacements it is the reference: no rounding except that of the stored BF16 weights. A `Replacement` receives

    linear   (name, x, w) -> y     every linear of the layers, such as "layers.3.mlp.down_proj"
    cached   (layer, k, v)         K (after QK-norm and RoPE) and V, as the cache receives them; returns what is read
    seen     (layer, q, k, v)      attention's operands, after `cached`; returns nothing

T tokens, E hidden size, H query heads, K kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.study.pairs import mean_of
from octetrl.layers.rotary import frequencies
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.run.build import full_precision
from octetrl.shapes.spec import ModelSpec

Linear = Callable[[str, Tensor, Tensor], Tensor]
Cached = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Seen = Callable[[int, Tensor, Tensor, Tensor], None]


def _product(_name: str, x_TI: Tensor, w_OI: Tensor) -> Tensor:
    return x_TI @ w_OI.t()


def _as_it_is(_layer: int, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    return k_TKD, v_TKD


def _nothing(_layer: int, _q_THD: Tensor, _k_TKD: Tensor, _v_TKD: Tensor) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a forward computes with, instead of the exact values."""

    linear: Linear = _product
    cached: Cached = _as_it_is
    seen: Seen = _nothing


EXACT = Replacement()


class PlainModel:
    """Weights in `dtype` (float64 is the reference; float32 is faster, with errors of about 1e-6)."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float64) -> None:
        spec = load_spec(Path(folder))
        model = Decoder(spec, full_precision(spec), "train")
        load_weights(model, folder)
        self.spec: ModelSpec = spec
        self.dtype = dtype
        self.weights = {name: weight.detach().to(dtype) for name, weight in model.named_parameters()}
        self.frequency_R = frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling)

    def embed(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weights["embedding.weight"])

    def logprobs(self, hidden_TE: Tensor) -> Tensor:
        """Log-probs [T, V] of the next token."""
        head = self.weights.get("lm_head.weight", self.weights["embedding.weight"])
        return torch.log_softmax(self._norm("norm", hidden_TE) @ head.t(), dim=1)

    def __call__(self, ids_T: Tensor, replacement: Replacement = EXACT) -> Tensor:
        """Log-probs [T, V] of one text from its first token."""
        return self.logprobs(self.layers(self.embed(ids_T), replacement)[-1])

    def layers(self, hidden_TE: Tensor, replacement: Replacement = EXACT, first: int = 0) -> list[Tensor]:
        """The residual stream before layer `first`, and after it and each later layer."""
        angle_TR = torch.outer(torch.arange(hidden_TE.shape[0], dtype=torch.float64), self.frequency_R)
        cos_TR, sin_TR = angle_TR.cos().to(self.dtype), angle_TR.sin().to(self.dtype)
        stream = [hidden_TE]
        for layer in range(first, self.spec.num_layers):
            hidden_TE = self._layer(layer, hidden_TE, cos_TR, sin_TR, replacement)
            stream.append(hidden_TE)
        return stream

    def _layer(self, layer: int, x_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, replacement: Replacement) -> Tensor:
        spec, name = self.spec, f"layers.{layer}"
        normed_TE = self._norm(f"{name}.attention_norm", x_TE)
        qkv_THD = self._linear(f"{name}.attention.qkv_proj", normed_TE, replacement).view(
            x_TE.shape[0], -1, spec.head_size
        )
        q_THD, k_TKD, v_TKD = qkv_THD.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if spec.qk_norm:
            q_THD = self._norm(f"{name}.attention.q_norm", q_THD)
            k_TKD = self._norm(f"{name}.attention.k_norm", k_TKD)
        q_THD, k_TKD = _rotate(q_THD, cos_TR, sin_TR), _rotate(k_TKD, cos_TR, sin_TR)
        k_TKD, v_TKD = (read.to(self.dtype) for read in replacement.cached(layer, k_TKD, v_TKD))
        replacement.seen(layer, q_THD, k_TKD, v_TKD)
        out_THD = attend(q_THD, k_TKD, v_TKD)
        x_TE = x_TE + self._linear(f"{name}.attention.o_proj", out_THD.flatten(1), replacement)
        normed_TE = self._norm(f"{name}.mlp_norm", x_TE)
        gate_TF, up_TF = self._linear(f"{name}.mlp.gate_up_proj", normed_TE, replacement).chunk(2, dim=1)
        return x_TE + self._linear(f"{name}.mlp.down_proj", F.silu(gate_TF) * up_TF, replacement)

    def _linear(self, name: str, x_TI: Tensor, replacement: Replacement) -> Tensor:
        y_TO = replacement.linear(name, x_TI, self.weights[f"{name}.weight"]).to(self.dtype)
        bias = self.weights.get(f"{name}.bias")
        return y_TO if bias is None else y_TO + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.spec.rms_norm_eps) * self.weights[f"{name}.weight"]


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, dim=2)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Causal attention of one sequence, [T, H, D]; query heads share K and V in consecutive groups."""
    tokens, heads, size = q_THD.shape
    shared = heads // k_TKD.shape[1]
    k_HTD = k_TKD.transpose(0, 1).repeat_interleave(shared, 0)
    v_HTD = v_TKD.transpose(0, 1).repeat_interleave(shared, 0)
    scores_HTT = q_THD.transpose(0, 1) @ k_HTD.transpose(1, 2) * size**-0.5
    future_TT = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return (scores_HTT.masked_fill(future_TT, -torch.inf).softmax(2) @ v_HTD).transpose(0, 1)


def divergence(reference_TV: Tensor, other_TV: Tensor) -> Tensor:
    """KL(reference || other) of each token, in nats, float64 [T]; both are log-probs."""
    reference_TV = reference_TV.double()
    return (reference_TV.exp() * (reference_TV - other_TV.double())).sum(1)


def change_of(texts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[str, object]:
    """How log-probs change, over texts: token ids [T], exact log-probs and those found, both [T, V]."""
    kls, changes, same = [], [], []
    for ids_T, exact_TV, found_TV in texts:
        targets_N1 = ids_T[1:, None]
        kls.append(float(divergence(exact_TV, found_TV).mean()))
        difference_N1 = found_TV[:-1].double().gather(1, targets_N1) - exact_TV[:-1].double().gather(1, targets_N1)
        changes.append(float(difference_N1.mean()))
        same.append(float((found_TV.argmax(1) == exact_TV.argmax(1)).double().mean()))
    kl = mean_of(kls)
    return {"kl": kl.mean, "kl_error": kl.error, "logprob_change": fmean(changes), "same_choice": fmean(same)}
