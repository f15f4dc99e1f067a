"""A plain training step of a whole model, to load a device with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bapipe.torch.capturing.export import examples_of
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.profiler.layer_runner import on_device, tensors_of

__all__ = ["training_step"]


def training_step(
    source: BuiltModel, *, device: torch.device, dtype: torch.dtype, size: int
) -> Callable[[], None]:
    """Forward and backward of the module with so many samples, waited for."""
    module = source.module.to(device=device, dtype=dtype).train()
    args, kwargs = examples_of(source.args, source.kwargs).resized(size).tree()
    leaves, spec = flatten((args, kwargs))
    own_args, own_kwargs = unflatten([on_device(leaf, device, dtype) for leaf in leaves], spec)

    def step() -> None:
        outputs = [value for value in tensors_of(module(*own_args, **own_kwargs)) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step
