"""The bytes that some code allocates for tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocated(TorchDispatchMode):
    """Counts the bytes of the CPU tensors that this thread allocates while it is active, of one dtype or of all. Files
    that are mapped into memory are not counted."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor) and self._dtype in (None, one.dtype) and one.device.type == "cpu":
                storage = one.untyped_storage()
                if storage._cdata not in given:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(held.cdata) for held in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)
