"""Copies the weights of a policy version into vLLM's model, and reads back what it holds.

The copies are in place, so captured graphs stay valid. Nothing is quantised again: codes and scales are ours. Under
`fp8_rollout` the trainer has no codes, and our quantiser makes them from its BF16 weights, as for our own engine.
Every parameter of vLLM's model must be covered: one that kept its dummy value is an error.

A rank of a tensor-parallel vLLM holds a part of the model, which is made from the workers' rows. All ranks then call
`put` and `digest` together, and an error of one is raised on all:

    q, k, v, gate, up      rows: vLLM's rank and our worker have the same ones, so nothing travels
    o_proj, down_proj      our worker has rows [R / T, C], vLLM's rank columns [R, C / T]: an exchange of blocks
    their biases           whole on vLLM's ranks: gathered
    embedding, lm_head     rows of equal ranges of the padded vocabulary; ours are whole chunks (shapes/tensor_cut.py)
    norms                  whole on both sides

Codes and scales are moved, never made: columns are cut at multiples of 128, whole blocks of a scale (`why_not_cut`).
An exchange takes at most `BUCKET_BYTES`, so that no tensor is there twice as a whole. T ranks, R rows and C columns of
the whole parameter, n rows of one exchange, B bytes of a row.

KV scales: with quant_method fp8 vLLM has one scale for all heads of K in a layer, and one for V. The largest of our
scales of the heads is used, on a rank that of its own heads. Q is quantised too, with scale 1: E4M3 holds magnitudes
from 2^-6 to 448 with the same relative precision. vLLM's scales of single heads (attn_head of compressed-tensors,
fp8_per_token_head) are not built here.

New scales reach only attention that reads them on the device. FLASH_ATTN does. FLASHINFER takes them as numbers of the
host: it keeps some from its first forward, and a captured graph keeps the others. So it is refused (`check_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from octetrl.backends.vllm.names import attention_name, vllm_name
from octetrl.backends.vllm.ranks import Ranks, together
from octetrl.config.backends import padded_vocabulary
from octetrl.engine.weights import digest_and_flags
from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.kv_scales import KVScales, split_scales
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.kernels.quantize.quantize_weight import check_scales, quantize_weight
from octetrl.records import WeightSet
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

BUCKET_BYTES = 1 << 26
VOCABULARY = ("embedding.weight", "lm_head.weight")


class VllmParts:
    """`spec`: of the part of the model that this worker has. `ranks` None: both sides have it whole."""

    def __init__(self, spec: ModelSpec, ranks: Ranks | None) -> None:
        self._spec, self._ranks = spec, ranks
        self._joined = {name for name, linear in spec.linears() if linear.joins}
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        self._size = size
        self.vocabulary_rows = padded_vocabulary(spec.vocab_size) // size  # of vLLM's parameter
        first, last = (min(at * self.vocabulary_rows, spec.vocab_size) for at in (rank, rank + 1))
        self.vocabulary = range(first, last)  # those that are no padding

    def shape(self, name: str, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape of vLLM's parameter, without padding. `name`: our parameter's, or `LINEAR.scale`. `ours`: the shape
        of our part."""
        rows, *columns = ours
        if name in VOCABULARY:
            return (len(self.vocabulary), *columns)
        if self._is_joined(name):
            return (rows * self._size, *(width // self._size for width in columns))
        return tuple(ours)

    def pieces(self, name: str, ours: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield what rows of vLLM's parameter must hold, and the first of these rows.

        All ranks iterate together, to the end. Each piece is valid until the next one.
        """
        if self._ranks is None:
            yield 0, ours
        elif name in VOCABULARY:
            yield from self._vocabulary_pieces(self._ranks, ours)
        elif self._is_joined(name) and ours.dim() > 1:
            yield from self._columns(self._ranks, ours)
        elif self._is_joined(name):
            yield 0, self._ranks.stack(ours).flatten(0, 1)
        else:
            yield 0, ours

    def _is_joined(self, name: str) -> bool:
        return self._ranks is not None and name.rpartition(".")[0] in self._joined

    def _columns(self, ranks: Ranks, ours_RC: Tensor) -> Iterator[tuple[int, Tensor]]:
        octets_RB = ours_RC.contiguous().view(torch.uint8)
        rows, width = octets_RB.shape
        most = max(1, BUCKET_BYTES // width)
        for first in range(0, rows, most):
            lot_nB = octets_RB[first : first + most]
            sent = lot_nB.unflatten(1, (ranks.size, -1)).movedim(1, 0).contiguous()
            for rank, taken in enumerate(ranks.exchange(sent)):
                yield rank * rows + first, taken.view(ours_RC.dtype)

    def _vocabulary_pieces(self, ranks: Ranks, ours: Tensor) -> Iterator[tuple[int, Tensor]]:
        cut, own = self._spec.tensor, self.vocabulary
        shares = [cut.vocabulary(self._spec.vocab_size, rank) for rank in range(ranks.size)]
        widest = max(map(len, shares))
        most = max(1, BUCKET_BYTES // (ranks.size * ours.shape[1] * ours.element_size()))
        for first in range(0, widest, most):
            sent = ours.new_zeros(min(most, widest - first), ours.shape[1])
            given = ours[first : first + most]
            sent[: given.shape[0]] = given
            for share, taken in zip(shares, ranks.stack(sent), strict=True):
                start = share.start + first
                low, high = max(start, own.start), min(start + len(sent), share.stop, own.stop)
                if low < high:
                    yield low - own.start, taken[low - start : high - start]


Q_SCALE = 1.0
LETTERS = "kvq"
ATTENTION = "FLASH_ATTN"  # vLLM's name of the attention that reads KV scales on the device


PUBLISH = "publish"
PARTS_OF_FP8 = (("weight", "weight"), ("scale", "weight_scale_inv"))  # our name and vLLM's


class VllmWeights:
    """Weights and KV scales in vLLM's model of this shape and precision. `spec`: of this worker's part."""

    def __init__(self, spec: ModelSpec, policy: PrecisionPolicy, ranks: Ranks | None = None) -> None:
        self._spec, self._policy, self._ranks = spec, policy, ranks
        self._parts = VllmParts(spec, ranks)
        self._fp8 = [linear.name for linear in policy.linears if linear.rollout == "fp8"]

    @torch.inference_mode()
    def put(self, model: Any, weights: WeightSet) -> None:
        """Copies all parameters. Raises RuntimeError naming a parameter that would keep its dummy value, or that has
        another shape; ValueError naming a weight that is not finite."""
        held = together(self._ranks, PUBLISH, lambda: self._places(model, weights))
        made: dict[str, tuple[Tensor, Tensor]] = {}
        for name, given in self._others(weights).items():
            self._write(held[vllm_name(name)], name, given)
        for name in self._fp8:
            codes, scale = weights.codes.get(name, (None, None))
            if codes is None or scale is None:
                weight = weights.tensors[f"{name}.weight"]
                codes, scale = quantize_weight(weight, self._policy.power_of_two, name=name, check=False)
                made[name] = (weight, scale)
            for given, (own, theirs) in zip((codes, scale), PARTS_OF_FP8, strict=True):
                self._write(held[f"{vllm_name(name)}.{theirs}"], f"{name}.{own}", given)
        together(self._ranks, PUBLISH, lambda: check_scales(made))

    def _places(self, model: Any, weights: WeightSet) -> dict[str, Tensor]:
        """All parameters of vLLM by its names, of the vocabulary without padding."""
        held = dict(model.named_parameters())
        found: dict[str, Tensor] = {}
        for name, given in self._others(weights).items():
            found[vllm_name(name)] = self._held(held, vllm_name(name), name, given.shape, given.dtype)
        for name in self._fp8:
            shape = (weights.codes[name][0] if name in weights.codes else weights.tensors[f"{name}.weight"]).shape
            blocks = [-(-size // BLOCK) for size in shape]
            for ours, dtype, (own, end) in zip((shape, blocks), (E4M3, torch.float32), PARTS_OF_FP8, strict=True):
                theirs = f"{vllm_name(name)}.{end}"
                found[theirs] = self._held(held, theirs, f"{name}.{own}", ours, dtype)
        if held:
            raise RuntimeError(f"publish: vLLM's '{min(held)}' is none of ours and would keep its random values")
        return found

    def _held(
        self, held: dict[str, Tensor], theirs: str, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """vLLM's parameter, which is taken out of `held`. Of an embedding, which vLLM pads, the rows of the vocabulary;
        the padding becomes zero. `shape`: of our part of it."""
        if theirs not in held:
            raise RuntimeError(f"publish: vLLM's model has no parameter '{theirs}'; vLLM changed the model's layout")
        found, wanted = held.pop(theirs), self._parts.shape(name, shape)
        is_sound = found.dtype == dtype
        if name in VOCABULARY:
            rows = self._parts.vocabulary_rows
            is_sound &= self._ranks is None or found.shape[0] == rows  # on ranks it decides which rows are where
            found[wanted[0] :].zero_()
            found = found[: wanted[0]]
        if found.shape != wanted or not is_sound:
            raise RuntimeError(
                f"publish: vLLM's '{theirs}' is {tuple(found.shape)} in {found.dtype}, and the trainer's is"
                f" {wanted} in {dtype}; vLLM changed its layout"
            )
        return found

    def _write(self, found: Tensor, name: str, given: Tensor) -> None:
        for start, piece in self._parts.pieces(name, given):
            _copy(found[start : start + piece.shape[0]], piece)

    def _is_same(self, found: Tensor, name: str, given: Tensor) -> Tensor:
        """Whether vLLM's parameter has the bytes that `given` asks for, on the device."""
        equal = [_equal(found[at : at + one.shape[0]], one) for at, one in self._parts.pieces(name, given)]
        return torch.stack(equal).all() if equal else torch.ones((), dtype=torch.bool, device=given.device)

    @torch.inference_mode()
    def digest(self, model: Any, weights: WeightSet, *, covers_all: bool = False) -> str:
        """Compares every byte with `weights`, as last put in. Of a whole model it is the same digest as our own
        engine's: with `covers_all` it covers the BF16 weights whose codes were made here, too."""
        version, held = weights.policy_version, dict(model.named_parameters())
        compared: list[tuple[str, Tensor]] = []
        read: list[Tensor] = []
        for index, name in enumerate(self._fp8):
            theirs = [held[f"{vllm_name(name)}.{end}"] for _, end in PARTS_OF_FP8]
            read += theirs
            given: Sequence[Tensor] = weights.codes.get(name, ())
            weight = weights.tensors.get(f"{name}.weight")
            if index == version % len(self._fp8) and weight is not None:
                fresh = quantize_weight(weight, self._policy.power_of_two, name=name, check=False)
                given = (*given, *fresh)
            ends = cycle(zip(theirs, PARTS_OF_FP8, strict=True))
            for one, (found, (own, _)) in zip(given, ends, strict=False):
                compared.append((name, self._is_same(found, f"{name}.{own}", one)))
        others = self._others(weights)
        for name, one in others.items():
            compared.append((name, self._is_same(held[vllm_name(name)], name, one)))
        if covers_all:
            made = {f"{name}.weight" for name in self._fp8 if name not in weights.codes}
            for name, one in weights.tensors.items():
                if name in others:
                    rows, *_ = self._parts.shape(name, one.shape)
                    read.append(held[vllm_name(name)][:rows])
                elif name in made:
                    read.append(one)
        digest, flags = digest_and_flags(version, read, [equal for _, equal in compared])
        together(self._ranks, PUBLISH, lambda: _refuse([name for name, _ in compared], flags, version))
        return digest

    def _others(self, weights: WeightSet) -> Mapping[str, Tensor]:
        """Parameters that are not FP8, by our name."""
        fp8 = {f"{name}.weight" for name in self._fp8}
        return {name: tensor for name, tensor in weights.tensors.items() if name not in fp8}

    # ------------------------------------------------------------ KV scales

    def check_attention(self, model: Any) -> None:
        """Raises UserError if a layer's attention may keep old scales."""
        modules = dict(model.named_modules())
        for layer in range(self._spec.num_layers):
            found = modules[attention_name(layer)].attn_backend.get_name()
            if found != ATTENTION:
                raise UserError(
                    f"fp8.kv_cache: vLLM chose the attention {found} in layer {layer}, which may keep old KV scales;"
                    f" only {ATTENTION} reads new ones (on Hopper GPUs); use none, or engine.backend: octetrl"
                )

    @torch.inference_mode()
    def put_scales(self, model: Any, scales: KVScales) -> None:
        """Writes the scales of every layer, on the device and on the host, then reads them back."""
        modules = dict(model.named_modules())
        wanted = self.layer_scales(scales)
        for layer, (k_scale, v_scale) in enumerate(wanted):
            attention = modules[attention_name(layer)]
            for letter, value in zip(LETTERS, (k_scale, v_scale, Q_SCALE), strict=True):
                getattr(attention, f"_{letter}_scale").fill_(value)
                setattr(attention, f"_{letter}_scale_float", value)
        self.check_scales(model, scales)

    @torch.inference_mode()
    def check_scales(self, model: Any, scales: KVScales) -> None:
        """Raises RuntimeError naming the first layer whose scale is not the one last put in. Each is there twice: on
        the device, where FLASH_ATTN reads it, and as a number of the host."""
        modules = dict(model.named_modules())
        layers = [modules[attention_name(layer)] for layer in range(self._spec.num_layers)]
        on_device = torch.stack([_scales_of(layer) for layer in layers]).tolist()
        for layer, (found, pair) in enumerate(zip(on_device, self.layer_scales(scales), strict=True)):
            wanted = [*pair, Q_SCALE]
            on_host = [getattr(layers[layer], f"_{letter}_scale_float") for letter in LETTERS]
            for held in (found, on_host):
                if held != wanted:
                    raise RuntimeError(
                        f"publish: vLLM's scales of K, V and Q in layer {layer} are {held}, and {wanted} were put in at"
                        f" policy version {scales.policy_version}; stopping"
                    )

    def layer_scales(self, scales: KVScales) -> list[tuple[float, float]]:
        """The scales of K and V of each layer: the largest of the heads'."""
        pairs = [
            torch.stack([one.max() for one in split_scales(row, self._spec.cached(layer)) if one is not None])
            for layer, row in enumerate(scales.scale_LS)
        ]
        return [(k, v) for k, v in torch.stack(pairs).tolist()]


def _refuse(names: Sequence[str], flags: Sequence[bool], version: int) -> None:
    for name, equal in zip(names, flags, strict=True):
        if not equal:
            raise RuntimeError(f"publish: vLLM's '{name}' differs from the trainer's at policy version {version}")


def _scales_of(attention: Any) -> Tensor:
    return torch.stack([getattr(attention, f"_{letter}_scale") for letter in LETTERS])


def _octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _copy(held: Tensor, given: Tensor) -> None:
    held.view(torch.uint8).copy_(_octets(given))


def _equal(held: Tensor, given: Tensor) -> Tensor:
    """Whether all bytes are equal, on the device."""
    return (_octets(held) == _octets(given)).all()
