"""Taps on the forwards that a GPU runs: models/rollout_forward.py and models/training_forward.py.

They have no modules to hook: they are plain functions that call kernels. Each is looked up in its file's namespace at
the call, so while a tap is open the functions between two GEMMs are replaced there by ones that call them and tell what
came out. Nothing is computed otherwise than in a run, except that the host stops for notes: it is for looking, not for
captured graphs.

Where the next linear is FP8 the fused kernels make codes and no BF16 tensor. What is noted then is code times scale, at
the site "norm, quantised" (and so on), which both fused forwards pass and the modules do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from octetrl.doctor.taps import Note, Site, Tap, read_back, values_of
from octetrl.fp8.quantize import Quantized, dequantize_activation
from octetrl.layers.context import Context, PagedContext
from octetrl.layers.linear import Projection
from octetrl.models import rollout_forward, training_forward
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.decoder import Decoder, RunLayer

Function = Callable[..., Any]
LINEAR_SITES = (
    ("attention.qkv_proj", "qkv_proj"),
    ("attention.o_proj", "o_proj"),
    ("mlp.gate_up_proj", "gate_up_proj"),
    ("mlp.down_proj", "down_proj"),
)


class FusedTap(Tap):
    """What the taps on both fused forwards share. `namespace`: the file whose functions are replaced."""

    namespace: ModuleType

    def __init__(self, model: Decoder, note: Note) -> None:
        super().__init__(model, note)
        self.layer = 0  # that is running
        self.sites: dict[int, Site] = {}  # of a module, by its id
        for index, layer in enumerate(model.decoder_layers()):
            self.sites[id(layer.attention_norm)] = Site(index, "norm")
            self.sites[id(layer.mlp_norm)] = Site(index, "MLP norm")
            self.sites |= {id(layer.get_submodule(name)): Site(index, op) for name, op in LINEAR_SITES}
        self.sites[id(model.norm)] = Site(None, "final norm")

    def replace(self, stack: ExitStack, name: str, make: Callable[[Function], Function]) -> None:
        """`name` in the namespace is `make(what it was)` until the stack unwinds."""
        names = vars(self.namespace)
        stack.callback(names.__setitem__, name, names[name])
        names[name] = make(names[name])

    def tell(self, site: Site, made: Tensor | Quantized) -> None:
        if isinstance(made, Quantized):
            self.note(Site(site.layer, f"{site.op}, quantised"), self.rows_T, dequantize_activation(made))
        else:
            self.note(site, self.rows_T, made)

    def tell_here(self, op: str, made: Tensor | Quantized) -> None:
        self.tell(Site(self.layer, op), made)

    def product(self, original: Function) -> Function:
        def project(linear: Projection, x: Any) -> Tensor:
            y_TN: Tensor = original(linear, x)
            self.tell(self.sites[id(linear)], y_TN)
            return y_TN

        return project

    def told(self, op: str) -> Callable[[Function], Function]:
        """Tells what a kernel of the running layer gives."""

        def make(original: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                made = original(*args, **kwargs)
                self.tell_here(op, made[0] if isinstance(made, tuple) and not isinstance(made, Quantized) else made)
                return made

            return call

        return make


class RolloutTap(FusedTap):
    """On `rollout_forward`."""

    namespace = rollout_forward

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        assert isinstance(context, PagedContext)
        return rollout_forward.rollout_forward(self.model, token_ids_T, positions_T, context)

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.after(stack, self.model.embedding, Site(None, "embedding"))
            self.replace(stack, "_add_norm", self._add_norm)
            self.replace(stack, "_attend", self._attend)
            self.replace(stack, "_project", self.product)
            self.replace(stack, "qkv_store", self.told("rotated q"))
            self.replace(stack, "attention_paged", self._attention_paged)
            for name in ("silu_mul", "silu_mul_quantize"):
                self.replace(stack, name, self.told("SiLU"))
            yield

    def _add_norm(self, original: Function) -> Function:
        def add_norm(delta_TE: Tensor | None, hidden_TE: Tensor, norm: nn.Module, eater: Any) -> Any:
            hidden_TE, normed = original(delta_TE, hidden_TE, norm, eater)
            site = self.sites[id(norm)]
            if delta_TE is not None:  # the first norm adds nothing
                op = "residual" if site.op == "MLP norm" else "residual after MLP"
                self.tell_here(op, hidden_TE)
            self.tell(site, normed)
            return hidden_TE, normed

        return add_norm

    def _attend(self, original: Function) -> Function:
        def attend(attention: Attention, x: Any, rotary: Any, positions_T: Tensor, context: PagedContext) -> Tensor:
            self.layer, self.context = attention.layer, context
            out_TE: Tensor = original(attention, x, rotary, positions_T, context)
            return out_TE

        return attend

    def _attention_paged(self, original: Function) -> Function:
        told = self.told("attention out")(original)

        def attention_paged(*args: Any, **kwargs: Any) -> Any:
            cached = read_back(self.context.layers[self.layer], self.context.slot_mapping_T)
            for op, values_TKD in zip(("k as cached", "v as cached"), cached, strict=True):
                self.tell_here(op, values_TKD)
            return told(*args, **kwargs)

        return attention_paged


class TrainingTap(FusedTap):
    """On the layers of `training_forward`. `run_layer`: as the trainer runs them (activation_checkpoint.py),
    with a graph that nothing is done with: what a layer keeps for its backward decides which kernels it runs."""

    namespace = training_forward
    with_graph = True

    def __init__(self, model: Decoder, note: Note, run_layer: RunLayer) -> None:
        super().__init__(model, note)
        self._run_layer = run_layer

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        def run_layer(layer: nn.Module, hidden_TE: Tensor, rotary: Any, context: Context) -> Tensor:
            self.layer = self.sites[id(layer.attention_norm)].layer or 0
            hidden_TE = self._run_layer(layer, hidden_TE, rotary, context)
            self.tell_here("residual after MLP", hidden_TE)
            return hidden_TE

        hidden_TE: Tensor = self.model(token_ids_T, positions_T, context, run_layer)
        return hidden_TE

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.after(stack, self.model.embedding, Site(None, "embedding"))
            self.after(stack, self.model.norm, Site(None, "final norm"))
            self.replace(stack, "_normed", self._normed)
            self.replace(stack, "_product", self.product)
            self.replace(stack, "_rotated", self._rotated)
            self.replace(stack, "attention_packed_forward_triton", self.told("attention out"))
            self.replace(stack, "_input", self._input)
            self.replace(stack, "_gated", self.told("SiLU"))
            yield

    def _normed(self, original: Function) -> Function:
        def normed(x_TE: Tensor, norm: nn.Module, *args: Any, **how: Any) -> Any:
            made = original(x_TE, norm, *args, **how)
            site = self.sites[id(norm)]
            if site.op == "MLP norm":
                self.tell_here("residual", x_TE)  # which the norm has added up in place
            self.tell(site, made.rows)
            return made

        return normed

    def _rotated(self, original: Function) -> Function:
        def rotated(*args: Any, **kwargs: Any) -> Any:
            q_THD, kv = original(*args, **kwargs)
            seen = (q_THD, *values_of(kv))
            for op, values in zip(("rotated q", "k as cached", "v as cached"), seen, strict=True):
                self.tell_here(op, values)
            return q_THD, kv

        return rotated

    def _input(self, original: Function) -> Function:
        def quantised(linear: Projection, x_TC: Tensor, **how: bool) -> Any:
            made = original(linear, x_TC, **how)
            if self.sites[id(linear)].op == "o_proj" and isinstance(made.rows, Quantized):
                self.tell_here("attention out", made.rows)
            return made

        return quantised


def engine_tap(model: Decoder, note: Note) -> Tap:
    """On what the engine runs: fused where device and model allow it."""
    if model.lm_head_weight.is_cuda and rollout_forward.can_fuse(model):
        return RolloutTap(model, note)
    return Tap(model, note)


def trainer_tap(model: Decoder, keep: training_forward.Keep, note: Note) -> Tap:
    """On what the trainer runs: fused where device and model allow it."""
    run_layer = training_forward.fused_layer_runner(model, keep)
    return Tap(model, note) if run_layer is None else TrainingTap(model, note, run_layer)
