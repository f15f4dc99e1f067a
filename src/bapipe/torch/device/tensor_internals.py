"""Private parts of torch about tensors: kernels over lists of them, what autocast casts, and what is a view.

Written against torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["casts_within", "copy_tensors", "is_view", "multiply_gradients"]

T = TypeVar("T")


def is_view(value: Tensor) -> bool:
    """Whether autograd knows it as a view of another tensor."""
    return bool(value._is_view())


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, of whatever dtype, in as few kernels as there can be."""
    with torch.no_grad():
        torch._foreach_copy_(list(targets), list(sources))


def multiply_gradients(gradients: Sequence[Tensor], factor: float, device: torch.device) -> bool:
    """Multiply all in place, in as few kernels as there can be; whether one of them is not finite."""
    found, by = torch.zeros(1, device=device), torch.full((1,), factor, device=device)
    for dtype in dict.fromkeys(item.dtype for item in gradients):
        same = [item for item in gradients if item.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, by)
    return bool(found)


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the copies that are made of some tensors in one dtype."""

    def __init__(self, originals: Mapping[int, int], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals, self._dtype = originals, dtype
        self.found: dict[int, tuple[int, int]] = {}
        """key of the original -> address and bytes of its copy"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype == self._dtype:
            key = self._originals.get(args[0].untyped_storage().data_ptr())
            if key is not None and made.numel() == args[0].numel():
                storage = made.untyped_storage()
                self.found[key] = (storage.data_ptr(), storage.nbytes())
        return made


def casts_within(
    function: Callable[[], T], originals: Sequence[Tensor], dtype: torch.dtype
) -> tuple[T, dict[int, tuple[int, int]]]:
    """What the function returns; and of the copies in that dtype that it made of tensors, address and bytes, by
    the tensors' ids."""
    mode = _Casts({item.untyped_storage().data_ptr(): id(item) for item in originals}, dtype)
    with mode:
        return function(), mode.found
