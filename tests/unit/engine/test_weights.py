"""Publishing: the engine reads the trainer's own tensors, and whatever it holds instead is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.engine.weights import digest_of, put_weights, share_weights, weight_set, weights_digest
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.rows.sum_words import sum_words
from octetrl.layers.context import PackedContext
from octetrl.layers.linear import Float8Linear
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config

PRECISIONS = {
    "bf16": Fp8Config(),
    "fp8_rollout": Fp8Config(rollout=True),
    "fp8": Fp8Config(rollout=True, train=True),
    "mixed": Fp8Config(rollout=True, train=True, ignore=("layers.0.mlp.*",)),
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 40}


def pair(precision: str, *, tied: bool = True, seed: int = 0) -> tuple[Decoder, Decoder]:
    """An engine's model, made of nothing, and the trainer's whose weights it shares; both filled."""
    spec = spec_from_config(preset_config("tiny") | SMALL | {"tie_word_embeddings": tied})
    policy = precision_policy(spec, PRECISIONS[precision])
    trainer = Decoder(spec, policy, "train")
    trainer.random_init(seed)
    engine = Decoder(spec, policy, "rollout", device="meta")
    share_weights(engine, trainer)
    put_weights(engine, weight_set(trainer, 0))
    return engine, trainer


def digest(engine: Decoder, trainer: Decoder, version: int) -> str:
    return weights_digest(engine, weight_set(trainer, version))


def step(trainer: Decoder, *, requantize: bool = True) -> None:
    """What an optimizer does to the weights."""
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.5)
    if requantize:
        trainer.requantize()


@torch.no_grad()
def hidden_states(model: Decoder) -> torch.Tensor:
    tokens_T = torch.arange(12) % 40
    return model(tokens_T, torch.arange(12), PackedContext(torch.tensor([0, 12], dtype=torch.int32), 12))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_engine_of_nothing_takes_the_trainers_tensors(precision: str, tied: bool) -> None:
    engine, trainer = pair(precision, tied=tied)
    for name, parameter in engine.named_parameters():
        assert parameter.data_ptr() == trainer.get_parameter(name).data_ptr(), name
    assert not any(tensor.is_meta for tensor in (*engine.parameters(), *engine.buffers()))
    if precision != "fp8_rollout":
        assert torch.equal(hidden_states(engine), hidden_states(trainer))


def test_codes_are_shared_where_both_sides_have_them() -> None:
    engine, trainer = pair("fp8")
    theirs = dict(trainer.float8_linears())
    assert len(theirs) == len(list(engine.float8_linears())) == 8
    for name, linear in engine.float8_linears():
        assert linear.weight is None and linear.codes is theirs[name].codes and linear.scale is theirs[name].scale
    before = hidden_states(engine)
    step(trainer)
    assert not torch.equal(hidden_states(engine), before)
    assert torch.equal(hidden_states(engine), hidden_states(trainer))


def test_codes_of_the_rollout_alone_are_the_engines_own() -> None:
    engine, trainer = pair("fp8_rollout")
    assert not list(trainer.float8_linears())
    step(trainer)
    with pytest.raises(RuntimeError, match="stale"):
        hidden_states(engine)
    put_weights(engine, weight_set(trainer, 0))
    published = hidden_states(engine)
    assert published.isfinite().all() and not torch.equal(published, hidden_states(trainer))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_published_passes_and_its_digest_tells_it_apart(precision: str) -> None:
    engine, trainer = pair(precision)
    first = [digest(engine, trainer, version) for version in range(9)]
    assert len(set(first)) == 9, "the version is part of the digest"
    assert digest(*pair(precision), 3) == first[3]
    step(trainer)
    put_weights(engine, weight_set(trainer, 0))
    assert (digest(engine, trainer, 3) == first[3]) == (precision == "bf16"), "codes or scales changed"


@pytest.mark.parametrize("tensor", ["codes", "scale"])
def test_codes_and_scales_are_in_the_digest(tensor: str) -> None:
    """A bit that flips in memory that both sides share differs from nothing; other workers have another digest. Version
    0 quantises neither weight afresh."""
    engine, trainer = pair("fp8")
    before = digest(engine, trainer, 0)
    held = getattr(dict(engine.float8_linears())["layers.1.attention.o_proj"], tensor)
    held.view(torch.uint8)[0, 0] ^= 1
    assert digest(engine, trainer, 0) != before


def flip_a_code(linear: Float8Linear) -> None:
    linear.codes = linear.codes.clone()
    linear.codes.view(torch.uint8)[3, 5] ^= 1


def flip_a_scale(linear: Float8Linear) -> None:
    linear.scale = linear.scale.clone()
    linear.scale.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize("flip", [flip_a_code, flip_a_scale])
def test_a_flipped_bit_is_found_and_named(flip: Callable[[Float8Linear], None]) -> None:
    engine, trainer = pair("fp8")
    flip(dict(engine.float8_linears())["layers.1.attention.o_proj"])
    for version in range(8):
        with pytest.raises(RuntimeError, match=f"'layers.1.attention.o_proj' differs .* policy version {version}"):
            digest(engine, trainer, version)


@pytest.mark.parametrize("precision", ["fp8", "fp8_rollout"])
def test_stale_codes_are_found(precision: str) -> None:
    """All of them: each version quantises another weight afresh, and none has the codes of the stepped weights."""
    engine, trainer = pair(precision)
    step(trainer, requantize=False)
    names = [name for name, _ in engine.float8_linears()]
    for version in range(len(names)):
        with pytest.raises(RuntimeError, match=f"'{names[version]}' differs"):
            digest(engine, trainer, version)


def test_one_stale_weight_is_found_within_a_round_of_versions() -> None:
    engine, trainer = pair("fp8")
    with torch.no_grad():
        trainer.get_parameter("layers.0.mlp.down_proj.weight").mul_(1.5)
    found = []
    for version in range(8):
        try:
            digest(engine, trainer, version)
        except RuntimeError as error:
            found.append(str(error))
    assert len(found) == 1 and "layers.0.mlp.down_proj" in found[0]


@pytest.mark.parametrize("name", ["layers.1.attention.q_norm", "norm", "embedding"])
def test_a_tensor_that_is_no_longer_shared_is_found_once_it_differs(name: str) -> None:
    engine, trainer = pair("fp8")
    module = engine.get_submodule(name)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    digest(engine, trainer, 1)
    step(trainer)
    with pytest.raises(RuntimeError, match=f"'{name}.weight' differs"):
        digest(engine, trainer, 1)


def test_weights_that_lie_elsewhere_are_copied_in_place() -> None:
    """As they come from another process: the engine's tensors keep their addresses, and hold the new bytes."""
    engine, trainer = pair("fp8")
    for module in engine.modules():  # memory of its own
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: t if t is None else type(t)(t.detach().clone()) for key, t in tensors.items()})
    addresses = [tensor.data_ptr() for tensor in (*engine.parameters(), *engine.buffers())]
    step(trainer)
    with pytest.raises(RuntimeError, match="differs"):
        digest(engine, trainer, 1)
    put_weights(engine, weight_set(trainer, 1))
    assert digest(engine, trainer, 1)
    assert addresses == [tensor.data_ptr() for tensor in (*engine.parameters(), *engine.buffers())]
    assert torch.equal(hidden_states(engine), hidden_states(trainer))


# --- the digest: it shows changed bytes and changed places, and does not depend on the parts it is added in -----------


def drawn(dtype: torch.dtype = torch.bfloat16, columns: int = 32) -> torch.Tensor:
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("columns", [32, 33], ids=["words", "bytes"])
def test_swapped_values_of_a_row_or_of_a_column_show(columns: int) -> None:
    w = drawn(columns=columns)
    digests = {digest_of(1, [w])}
    for (row, column), (row2, column2) in (((2, 3), (2, 17)), ((2, 3), (4, 3)), ((0, 4), (0, 8))):
        swapped = w.clone()
        swapped[row, column], swapped[row2, column2] = w[row2, column2], w[row, column]
        digests.add(digest_of(1, [swapped]))
    in_words = w.clone()
    in_words[1, :4], in_words[1, 4:8] = w[1, 4:8], w[1, :4]  # eight bytes each
    assert len(digests | {digest_of(1, [in_words]), digest_of(2, [w])}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_signs_that_changed_in_pairs_show(dtype: torch.dtype) -> None:
    """The sign of the last value of a word is its top bit."""
    w = drawn(torch.float32)
    columns = w.clone()
    columns[:, 7::8] *= -1
    two = w.clone()
    two[2, 7] *= -1
    two[5, 15] *= -1
    assert len({digest_of(1, [one.to(dtype)]) for one in (w, columns, two)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_signs_that_changed_in_one_row_show(dtype: torch.dtype) -> None:
    """Any number of words whose top bit changed. A sum to which each adds plus or minus the same number would hide half
    of the pairs."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 256, generator=generator).to(dtype)
    octets = w.view(torch.uint8).view(2, -1, 8)
    unchanged = digest_of(1, [w])
    for trial in range(200):
        changed = octets.clone()
        words = torch.randperm(octets.shape[1], generator=generator)[: 2 if trial % 2 else 8]
        changed[0, words, 7] ^= 0x80 >> (trial // 2 % 3)
        assert digest_of(1, [changed.view(2, -1).view(dtype)]) != unchanged, words


def test_parts_are_no_part_of_it() -> None:
    """Several workers may have some rows each."""
    w = drawn()
    assert digest_of(1, [w[:2], w[2:]]) == digest_of(1, [w])


def test_tensors_of_many_shapes_in_one_sum() -> None:
    """Each tensor's rows have the sums that they have alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (8,), (3, 5), (7,), (2, 3, 4), (2, 3, 4), (0, 5), (8,), (600, 900), (3, 5))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors = [*drawn, *(one.bfloat16() for one in drawn), *(one.to(torch.float8_e4m3fn) for one in drawn)]
    tensors.append(torch.randn(5, 3, generator=generator).t())
    assert torch.equal(sum_words(tensors), torch.cat([sum_words([one]) for one in tensors]))
    assert sum_words([torch.zeros(0, 8)]).shape == (0,) and digest_of(1, []) == digest_of(1, [torch.zeros(0, 8)])
    assert digest_of(1, tensors) != digest_of(1, [tensors[2], tensors[1], tensors[0], *tensors[3:]])


def test_a_digest_is_what_it_was() -> None:
    """Workers and backends compare digests: the definition must not drift."""
    w = torch.arange(96, dtype=torch.uint8).view(6, 16)
    assert digest_of(3, [w, w[0, :5].clone(), w[:3, :7].clone()]) == "5139dec75e800878"
