"""Compiles every kernel for a GPU that this machine need not have, and lists what came out.

    python -m tests.unit.kernels.compile_kernels [--target 100] [--each 2] [TEST_FILE ...]

The kernels' own tests launch them: Triton's driver is replaced, CPU tensors say that they are on a GPU of compute
capability TARGET / 10, and a launch compiles only. So the code chooses kernels as it does on that GPU, with its own
instructions in place of their plain forms, and a kernel without a launch in any test is reported. Nothing is computed:
what the tests then assert is ignored. At most `--each` variants of a kernel are compiled.

A line a variant: registers of a thread, bytes of its stack (registers that
were spilled), bytes of shared memory, and how many instructions of which unit multiply: `tcgen05.mma` (Blackwell;
`block_scale`: MXFP8's), `wgmma.mma_async` (Hopper), `mma.sync` (any). Exit code 1: a kernel does not compile, or none
of the tests launched it.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from octetrl import kernels
from tests.unit.kernels import compile_gluon, interpreting
from tests.unit.kernels.offline import SHARED_MEMORY, Compiler, variant_of, zeros

LAST = ("test_attention_triton.py",)  # it changes constants for good
HOPPER = 90


class OnGpu:
    """A plugin of pytest: while a test runs, every tensor says that it is on a GPU."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        torch.Tensor.is_cuda = True  # type: ignore[misc,assignment]
        yield
        del torch.Tensor.is_cuda


def kernels_for(target: int) -> set[str]:
    """Names of the functions in octetrl/kernels that are launched. Those in Gluon are for Hopper alone."""
    names = [found.name for found in walk_packages(kernels.__path__, "octetrl.kernels.")]
    return {
        name
        for module in map(import_module, names)
        if target == HOPPER or not module.__name__.endswith("_gluon")
        for name, member in vars(module).items()
        if isinstance(member, JITFunction) and member.__module__ == module.__name__
        if name.startswith("_") and name.endswith("_kernel")
    }


def launch_all(target: int, files: list[str]) -> None:
    """Runs the kernels' tests. What they assert, or raise after a launch, is of no interest."""
    interpreting._device_functions = list  # type: ignore[assignment]
    interpreting.mend_interpreter = lambda: None
    interpreting.run_interpreted = lambda module: runpy.run_module(module, run_name="__main__")
    folder = Path(__file__).parent
    names = files or sorted(path.name for path in folder.glob("test_*.py") if "compile" not in path.name)
    ordered = sorted(names, key=lambda name: name in LAST)
    options = ["-q", "--tb=no", "--no-header", "--no-summary", "--assert=plain", "-p", "no:cacheprovider", "-n", "0"]
    pytest.main([*options, "-m", "not gpu", *(str(folder / name) for name in ordered)], plugins=[OnGpu()])
    if not files:
        launch_peers()
        if target == HOPPER:
            compile_gluon.launch_all()


def launch_peers() -> None:
    """Its tests replace the launch, because programs of several GPUs wait for each other."""
    from octetrl.kernels.rows.gather_from_peers import gather_from_peers
    from tests.unit.kernels.test_gather_from_peers import memory_of, shared_memory

    torch.Tensor.is_cuda = True  # type: ignore[misc,assignment]
    gather_from_peers(memory_of(0, *shared_memory(2)), zeros(16, 64))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, default=100, choices=SHARED_MEMORY, help="compute capability times 10")
    parser.add_argument("--each", type=int, default=2, help="most variants of a kernel")
    parser.add_argument("files", nargs="*", help="names in tests/unit/kernels; all by default")
    given = parser.parse_args()
    compiler = Compiler(given.target, given.each)
    compiler.install()
    launch_all(given.target, given.files)
    made = {name: found for name, found in sorted(compiler.compiled.items()) if found}
    print(f"\nTriton {triton.__version__}, sm_{given.target}")
    for name, found in made.items():
        print(*(variant_of(name, one) for one in found.values()), sep="\n")
    for name, reason in compiler.failed.items():
        print(f"{name} DOES NOT COMPILE: {reason}")
    missing = set() if given.files else kernels_for(given.target) - made.keys() - compiler.failed.keys()
    for name in sorted(missing):
        print(f"{name} IS NOT LAUNCHED by any test")
    print(f"{len(made)} kernels, {sum(map(len, made.values()))} variants")
    return int(bool(compiler.failed or missing))


if __name__ == "__main__":
    sys.exit(main())
