"""The same training in one process, and how far a run is from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.records.run_record import CheckRecord
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.verify.single_process import WholeModel, fitting

__all__ = [
    "Gradients",
    "compare_gradients",
    "gradients",
    "joined",
    "largest",
    "relative",
    "tolerance",
    "train_alone",
]

Gradients = dict[str, Tensor]
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""relative; anything coarser: 1e-2"""
_CPU = torch.device("cpu")


def gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """A copy of every parameter's gradient in host memory by name; zeros where none came."""
    return {
        name: torch.zeros_like(parameter, device=_CPU)
        if parameter.grad is None
        else parameter.grad.detach().to(_CPU, copy=True)
        for name, parameter in named_parameters
    }


def joined(ranks: Iterable[tuple[Gradients, Mapping[str, Slice]]]) -> Gradients:
    """Gradients of the whole model from every rank's, and of which of them it has only a part."""
    whole: Gradients = {}
    for own, parts in ranks:
        for name, value in own.items():
            part = parts.get(name)
            if part is None:
                whole[name] = value
                continue
            shape = [part.of if dim == part.dim else size for dim, size in enumerate(value.shape)]
            place = whole.setdefault(name, value.new_zeros(shape))
            place.narrow(part.dim, part.start, part.size).copy_(value)
    return whole


def tolerance(module: nn.Module) -> float:
    """The relative difference that the coarsest dtype among the parameters allows."""
    return max((_TOLERANCES.get(parameter.dtype, 1e-2) for parameter in module.parameters()), default=1e-12)


def train_alone(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    optimizer: torch.optim.Optimizer | None,
    after_step: Callable[[int, float], None],
    device: torch.device = _CPU,
) -> None:
    """Train the whole model on each mini-batch on one device, in the same micro-batches as the pipeline.

    After each update `after_step(step, loss)` is called, with the gradients still in the parameters.
    """
    module, whole, loss = built.module, WholeModel(built, sizes, device), LossSum(built.loss, sizes)
    for step, (inputs, target) in enumerate(batches):
        module.zero_grad(set_to_none=True)
        loss.begin()
        leaves, targets = whole.split(inputs, target)
        for microbatch in range(len(sizes)):
            output = whole.run(leaves[microbatch], microbatch, (step, microbatch))
            part = loss.of(output, targets[microbatch], microbatch, count=True)
            part.backward()  # type: ignore[no-untyped-call]
        total, count = loss.sums()
        if count:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= count
        if optimizer is not None:
            optimizer.step()
        after_step(step, total / count if count else total)


def compare_gradients(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    optimizer: torch.optim.Optimizer | None,
    found: Sequence[Gradients],
    losses: Sequence[float],
    device: torch.device = _CPU,
) -> CheckRecord:
    """Train alone and compare every parameter's gradient and the loss of every step with what the run `found`."""
    worst, where, worst_loss = 0.0, "", 0.0
    module = built.module

    def after_step(step: int, total: float) -> None:
        nonlocal worst, where, worst_loss
        expected = gradients(module.named_parameters())
        unused = {name for name, value in expected.items() if name not in found[step] and not value.any()}
        missing = (expected.keys() - unused) ^ found[step].keys()
        assert not missing, f"gradients of {sorted(missing)[:3]} are on one side only"
        for name, wanted in expected.items():
            if name in unused:
                continue
            difference = relative(largest(found[step][name] - wanted), largest(wanted))
            if difference > worst or not where:
                worst, where = difference, f"{name}, step {step}"
        worst_loss = max(worst_loss, relative(abs(losses[step] - total), abs(total)))

    with fitting(device):
        train_alone(built, batches, sizes=sizes, optimizer=optimizer, after_step=after_step, device=device)
    return CheckRecord(
        steps=len(batches),
        gradient_difference=worst,
        parameter=where,
        loss_difference=worst_loss,
        tolerance=tolerance(module),
    )


def largest(value: Tensor) -> float:
    """The largest entry by size; 0 where there is none."""
    return float(value.abs().max()) if value.numel() else 0.0


def relative(difference: float, size: float) -> float:
    """A difference relative to a size; where there is no such number, the largest that a file can hold."""
    if math.isfinite(difference) and math.isfinite(size):
        if difference == 0:
            return 0.0
        if size > 0:
            return difference / size
    return sys.float_info.max
