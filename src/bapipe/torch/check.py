"""The same training in one process, and how far a run is from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bapipe.run_record import CheckRecord
from bapipe.torch.build import Loss

__all__ = ["Gradients", "compare_gradients", "gradients", "tolerance", "train_alone"]

Gradients = dict[str, Tensor]
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""relative; anything coarser: 1e-2"""


def gradients(module: nn.Module) -> Gradients:
    """A copy of every parameter's gradient by name; zeros where none came."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def tolerance(module: nn.Module) -> float:
    """The relative difference that the coarsest dtype among the parameters allows."""
    return max((_TOLERANCES.get(parameter.dtype, 1e-2) for parameter in module.parameters()), default=1e-12)


def train_alone(
    module: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    sizes: Sequence[int],
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    after_step: Callable[[int, float], None],
) -> None:
    """Train the whole module on each mini-batch, in the same micro-batches as the pipeline.

    After each update `after_step(step, loss)` is called, with the gradients still in the parameters.
    """
    for step, (data, target) in enumerate(batches):
        module.zero_grad(set_to_none=True)
        total = 0.0
        parts = zip(torch.split(data, list(sizes)), torch.split(target, list(sizes)), sizes, strict=True)
        for part, wanted, size in parts:
            weighted = loss(module(part), wanted) * (size / len(data))
            weighted.backward()  # type: ignore[no-untyped-call]
            total += float(weighted.detach())
        if optimizer is not None:
            optimizer.step()
        after_step(step, total)


def compare_gradients(
    module: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    sizes: Sequence[int],
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    found: Sequence[Gradients],
    losses: Sequence[float],
) -> CheckRecord:
    """Train alone and compare every parameter's gradient and the loss of every step with what the run `found`."""
    worst, where, worst_loss = 0.0, "", 0.0

    def after_step(step: int, total: float) -> None:
        nonlocal worst, where, worst_loss
        expected = gradients(module)
        missing = expected.keys() ^ found[step].keys()
        assert not missing, f"gradients of {sorted(missing)[:3]} are on one side only"
        for name, wanted in expected.items():
            difference = _relative(_largest(found[step][name] - wanted), _largest(wanted))
            if difference > worst or not where:
                worst, where = difference, f"{name}, step {step}"
        worst_loss = max(worst_loss, _relative(abs(losses[step] - total), abs(total)))

    train_alone(module, batches, sizes=sizes, loss=loss, optimizer=optimizer, after_step=after_step)
    return CheckRecord(
        steps=len(batches),
        gradient_difference=worst,
        parameter=where,
        loss_difference=worst_loss,
        tolerance=tolerance(module),
    )


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _relative(difference: float, size: float) -> float:
    """A difference relative to a size; where there is no such number, the largest that a file can hold."""
    if math.isfinite(difference) and math.isfinite(size):
        if difference == 0:
            return 0.0
        if size > 0:
            return difference / size
    return sys.float_info.max
