"""Bytes of all tensors that are alive, followed from operator to operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CountedBytes"]

_LETS_GO = 0.02
"""seconds in which the thread of a collective that has ended lets go of its tensors, on a busy machine too"""


class CountedBytes(TorchDispatchMode):
    """Counts before every operator what lives of the tensors that it has seen made, each storage once.

    What an operator needs within, or a thread of a collective, is not seen.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        """`there` is what lives already."""
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        self.most = 0
        for tensor in there:
            self._watch(tensor)

    def _watch(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        local = getattr(value, "_local_tensor", value)
        if local.device.type == "cpu":
            storage = StorageWeakRef(local.untyped_storage())
            self._known[storage.cdata] = storage

    def now(self) -> int:
        """Bytes that live."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.now() > self.most:
            time.sleep(_LETS_GO)
            self.most = max(self.most, self.now())
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._watch(leaf)
        return result
