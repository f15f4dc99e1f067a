"""A plain training step of a whole model, to load a device with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from bapipe.hardware.precision import Precision
from bapipe.torch.capturing.export import examples_of
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.device.dtypes import autocast_dtype, weights_dtype
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.profiler.layer_runner import on_device, tensors_of

__all__ = ["training_step"]


def training_step(
    source: BuiltModel, *, device: torch.device, precision: Precision, size: int
) -> Callable[[], None]:
    """Forward and backward of the module with so many samples, waited for."""
    dtype, autocast = weights_dtype(precision), autocast_dtype(precision)
    casting = contextlib.nullcontext() if autocast is None else MixedForward(device, autocast).forward()
    module = source.module.to(device=device, dtype=dtype).train()
    args, kwargs = examples_of(source.args, source.kwargs).resized(size).tree()
    leaves, spec = flatten((args, kwargs))
    own_args, own_kwargs = unflatten([on_device(leaf, device, dtype) for leaf in leaves], spec)

    def step() -> None:
        with casting:
            made = module(*own_args, **own_kwargs)
        outputs = [value for value in tensors_of(made) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step
