"""The models of a bench: random weights that the device draws, or those of the recipe's folder.

All precisions have the same weights: random ones follow from the seed and the kind of device.
"""

from __future__ import annotations

import gc

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer, load_tokenizer
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import Loading, filling
from octetrl.models.decoder import Decoder
from octetrl.models.random_weights import EMBEDDING_STD
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.build import BuiltWorker, Role, fill_weights, keep_codes
from octetrl.workers.worker import Worker


class NoText:
    """The tokenizer of a model with random weights: tokens have no text, and none of them ends an answer."""

    eos_token_id = None
    is_fast = False

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return ""


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a pretrained model, or `NoText`."""
    if recipe.model.init == "random" or recipe.model.path is None:
        return NoText()
    return load_tokenizer(recipe.model.path)


def bench_worker(
    spec: ModelSpec,
    recipe: Recipe,
    device: torch.device,
    *,
    trains: bool = True,
    draws: bool = True,
    peers: Peers = ALONE,
    loaders: Peers | None = None,
) -> Worker:
    """A worker as a run builds it, or of its part of the model. `spec`: of the whole model, which may have fewer layers
    than the recipe's. `draws` false: others generate."""
    return Worker(
        recipe,
        spec=spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        policy=precision_policy(spec, recipe.fp8),
        tokenizer=tokenizer_of(recipe),
        algorithm=build_algorithm(recipe.algorithm),
        load_weights=lambda model, loading: _fill(model, recipe, loading),
        device=device,
        trains=trains,
        draws=draws,
        peers=peers,
        loaders=loaders,
    )


def hosted_bench_worker(
    spec: ModelSpec, recipe: Recipe, device: torch.device, *, trains: bool, peers: Peers, loaders: Peers, role: Role
) -> BuiltWorker:
    """The same in a process of its own, for `WorkerPlan.build`."""
    does = {"trains": trains and role != "generates", "draws": role != "trains"}
    worker = bench_worker(spec, recipe, device, peers=peers, loaders=loaders, **does)
    if role == "generates":
        keep_codes(worker)
    return BuiltWorker(worker, loaded=worker.loaded)


def _fill(model: Decoder, recipe: Recipe, loading: Loading | None) -> None:
    if recipe.model.init == "random":
        draw_on_device(model, recipe.seed)
    else:
        fill_weights(model, recipe, loading)


@torch.no_grad()
def draw_on_device(model: Decoder, seed: int) -> None:
    """Like `Decoder.random_init`, but on the device, which creates billions of numbers a second. A part of a model gets
    its rows of the whole weights."""
    generator = torch.Generator(model.lm_head_weight.device).manual_seed(seed)
    fill, cut = filling(model), cut_rows_of(model.spec, model.lora)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
            rows = cut.get(name)
            with fill(name):
                drawn = parameter if rows is None else parameter.new_empty(rows.whole_rows, *parameter.shape[1:])
                drawn.normal_(std=std, generator=generator)
                if rows is not None:
                    parameter.copy_(torch.cat([drawn[one.whole : one.whole + one.rows] for one in rows.pieces]))


def code_bytes(model: Decoder) -> int:
    """Bytes of codes and scales that a publish renews; 0 if nothing is FP8."""
    return sum(linear.codes.numel() + 4 * linear.scale.numel() for _, linear in model.float8_linears())


def free_memory(device: torch.device) -> None:
    """Free the memory of an arm that has no references left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
