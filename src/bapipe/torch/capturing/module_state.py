"""Modules left as they were found, and modules without memory."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bapipe.torch.capturing.torch_internals import swap_parameter

__all__ = ["empty_parameters", "generators", "hollowed", "on_meta", "preserved"]


@contextlib.contextmanager
def generators() -> Iterator[None]:
    """Leave the random generators of torch, Python and numpy, and the gradient mode, as they were."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    grad = torch.is_grad_enabled()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Leave buffers, gradients and random generators as they were; costs a copy of the buffers."""
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with generators():
            yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, content in buffers:
                swap_parameter(owner, name, buffer)  # a model may have put another tensor in its place
                buffer.copy_(content)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def on_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no data."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@contextlib.contextmanager
def hollowed(module: nn.Module) -> Iterator[None]:
    """Stand-ins on the CPU, with shape and strides but no memory, for all that lies on the meta device.

    A meta tensor would be refused beside a buffer or an input that has data. Costs nothing but the address space
    of the largest parameter as workspace.
    """
    made: dict[int, Tensor] = {}
    swapped: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for owner in module.modules():
            own = (
                *owner.named_parameters(recurse=False, remove_duplicate=False),
                *owner.named_buffers(recurse=False),
            )
            for name, tensor in own:
                if not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _hollow(tensor)
                swapped.append((owner, name, tensor))
                swap_parameter(owner, name, made[id(tensor)])
        yield
    finally:
        for owner, name, tensor in swapped:
            swap_parameter(owner, name, tensor)


def _hollow(tensor: Tensor) -> Tensor:
    stand_in = torch.empty_like(tensor, device="cpu")
    stand_in.untyped_storage().resize_(0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    return stand_in


class _Empty(TorchFunctionMode):
    _creators = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._creators and kwargs.get("device") is None:
            if func is torch.empty:
                kwargs["device"] = "meta"
            else:
                probe = func(*args, **{**kwargs, "device": "meta"})
                if probe.numel() > 2**20:
                    return probe
        return func(*args, **kwargs)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Build a module in here and its large parameters take no memory, while its buffers keep their values.

    `torch.device("meta")` would lose buffers that are computed in the constructor and not saved, such as the
    frequencies of rotary embeddings. Uninitialised tensors, and others of over 2^20 elements, go to meta.
    """
    with _Empty():
        yield
