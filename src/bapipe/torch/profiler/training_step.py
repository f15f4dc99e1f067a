"""A plain training step of a whole model, to load a device with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bapipe.hardware.precision import Precision
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.export import examples_of
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, StageLayers
from bapipe.torch.device.dtypes import autocast_dtype, weights_dtype
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.profiler.layer_runner import on_device, tensors_of

__all__ = ["training_step"]


def training_step(
    source: BuiltModel,
    *,
    device: torch.device,
    precision: Precision,
    size: int,
    programs: CompiledPrograms | None = None,
) -> Callable[[], None]:
    """Forward and backward of the module with so many samples, waited for; with `programs` its layers compiled."""
    dtype, autocast = weights_dtype(precision), autocast_dtype(precision)
    casting = contextlib.nullcontext() if autocast is None else MixedForward(device, autocast).forward()
    module = source.module.to(dtype=dtype).train()
    args, kwargs = examples_of(source.args, source.kwargs).resized(size).tree()
    leaves, spec = flatten((args, kwargs))
    run = None if programs is None else _compiled(module, args, kwargs, dtype, programs)
    module.to(device)
    given = [on_device(leaf, device, dtype) for leaf in leaves]
    own_args, own_kwargs = unflatten(given, spec)

    def step() -> None:
        with casting:
            made = module(*own_args, **own_kwargs) if run is None else run(given)
        outputs = [value for value in tensors_of(made) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _compiled(
    module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype, programs: CompiledPrograms
) -> Callable[[list[Any]], Any]:
    """The whole module as one stage of compiled layers, called with its input leaves."""
    cpu = torch.device("cpu")
    leaves, spec = flatten((args, kwargs))
    own_args, own_kwargs = unflatten([on_device(leaf, cpu, dtype) for leaf in leaves], spec)
    captured = capture(module, own_args, own_kwargs, check=False)
    last = len(captured.layers) - 1
    module.to(programs.device)
    stage = captured.stage(0, last, device=programs.device).to(programs.device)
    programs.attach(stage, captured, StageLayers(first=0, last=last, parts={}, store={}))
    return lambda given: stage(*(given[root.index] for root in stage.stage_spec.roots))
