"""Which kernels a GPU runs: one table by architecture, for the code that chooses and for `octetrl check`. No torch.

                 FP8 products                             attention, BF16 products, experts
    sm_80        none: no FP8 in its tensor cores         plain Triton
    sm_89        none: not written for its tensor cores   plain Triton
    sm_90        cuBLASLt, Gluon and plain Triton         Gluon and plain Triton       the only one that was run
    sm_100       plain Triton, MXFP8 too                  plain Triton                 compiled, never run
    sm_120       none: not written for its tensor cores   plain Triton

Gluon's kernels use instructions that only Hopper has. Block-scaled products of cuBLASLt are Hopper's too, in torch. The
plain forms add in the same order: K ascending, one accumulator. That a tensor core keeps the bits for every tile was
observed on Hopper; elsewhere it was never looked at, so equal log-probs are measured and not promised.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Products = Literal["scaled_mm", "triton"]
MxProducts = Literal["dot_scaled"]
Capability = tuple[int, int]  # compute capability: (9, 0)


class Architecture(NamedTuple):
    """fp8, mx: the backends of its FP8 and MXFP8 products (fp8/backends.py); None: they are emulated. gluon: whether
    Gluon's kernels run. compiles: whether all kernels were compiled for it. was_run: whether its bits are tested."""

    name: str
    fp8: Products | None = None
    mx: MxProducts | None = None
    gluon: bool = False
    compiles: bool = False
    was_run: bool = False

    @property
    def state(self) -> str:
        """What is known of its kernels."""
        if self.was_run:
            return "run and timed"
        return "compiles, never run or timed" if self.compiles else "never compiled, run or timed"


OTHER = Architecture("an architecture that is not in the table")
ARCHITECTURES = {
    (8, 0): Architecture("sm_80"),
    (8, 9): Architecture("sm_89"),
    (9, 0): Architecture("sm_90", fp8="scaled_mm", gluon=True, compiles=True, was_run=True),
    (10, 0): Architecture("sm_100", fp8="triton", mx="dot_scaled", compiles=True),
    (12, 0): Architecture("sm_120"),
}


def architecture_of(capability: Capability) -> Architecture:
    """By compute capability: that of its generation, with the highest number that is not above it."""
    same = [known for known in ARCHITECTURES if known[0] == capability[0] and known <= capability]
    return ARCHITECTURES[max(same)] if same else OTHER


def kernel_choices(architecture: Architecture, *, mx: bool = False) -> dict[str, str]:
    """What runs each kind of operation. mx: FP8 products are MXFP8's."""
    plain = "Gluon and plain Triton" if architecture.gluon else "plain Triton"
    products = {"scaled_mm": "cuBLASLt, Gluon and plain Triton", None: "emulated"}
    return {
        "MXFP8 products" if mx else "FP8 products": products.get(
            architecture.mx if mx else architecture.fp8, "plain Triton"
        ),
        "BF16 products": f"cuBLAS, {plain}",
        "attention, experts": plain,
        "everything else": "plain Triton",
    }


def why_untested(capability: Capability | None) -> str | None:
    """What is not known of a GPU's bits. None if they are tested, or if the GPU is not known."""
    found = None if capability is None else architecture_of(capability)
    return None if found is None or found.was_run else f"no order of sums was ever tested on {found.name}"
