"""PipeDream's stale updates in one process, and how far a run is from them.

No pipeline is needed to say what PipeDream computes. Update m is that of the gradients that micro-batch m has with
each weight as it was after max(0, m − lag) updates, where the lag is that of the weight's stage:

    w(m+1) = update( w(m), gradient of m at [ w₀(m − lag₀), w₁(m − lag₁), … ] )
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.records.run_record import CheckRecord
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.verify.gradient_check import Gradients, largest, relative, tolerance
from bapipe.torch.verify.single_process import WholeModel, fitting

__all__ = ["Holding", "compare_stale", "train_stale"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A weight, or the part of it, that a stage has."""

    lag: int
    """so many updates behind the newest are the weights that its micro-batches see, once there are so many"""
    part: Slice | None = None
    """None: the whole"""


def train_stale(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    held: Mapping[str, Sequence[Holding]],
    optimizer: torch.optim.Optimizer | None,
    after_update: Callable[[int, float], None],
    first: int = 0,
    device: torch.device = _CPU,
) -> None:
    """Train the whole model on one device, with an update after every micro-batch, as PipeDream's stages do.

    `held` says of every parameter who has (which part of) it. After each update `after_update(number, loss)` is
    called, with the gradients still in the parameters. `first` is how many micro-batches the pipeline has had
    before, in runs that it drained after.
    """
    module, whole = built.module, WholeModel(built, sizes, device)
    parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
    longest = 1 + max((part.lag for parts in held.values() for part in parts), default=0)
    history: deque[dict[str, Tensor]] = deque(maxlen=longest)
    history.append(_copies(parameters))
    number = 0
    for inputs, target in batches:
        leaves, targets = whole.split(inputs, target)
        for place in range(len(sizes)):
            weights = {name: _seen(name, history, held.get(name, ()), number) for name in parameters}
            output = whole.run(leaves[place], place, (first + number, 0), weights)
            found = whole.loss_of(output, targets[place])
            if found.isnan():  # a mean over nothing: nothing is learnt from it
                found = torch.zeros_like(found)
            else:
                found.backward()  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items():
                parameter.grad = weights[name].grad
            if optimizer is not None:
                optimizer.step()
            history.append(_copies(parameters))
            after_update(number, float(found.detach()))
            number += 1


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in parameters.items()}


def _seen(name: str, history: Sequence[Mapping[str, Tensor]], parts: Sequence[Holding], number: int) -> Tensor:
    """A weight as micro-batch `number` sees it, put together from the versions that its parts have."""
    value = history[-1][name].clone()
    for holding in parts:
        # After `number` updates the last entry is version `number`.
        behind = min(holding.lag, number)
        old = history[-1 - behind][name]
        if holding.part is None:
            value.copy_(old)
        else:
            where = (holding.part.dim, holding.part.start, holding.part.size)
            value.narrow(*where).copy_(old.narrow(*where))
    return value.requires_grad_()


def compare_stale(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    held: Mapping[str, Sequence[Holding]],
    optimizer: torch.optim.Optimizer | None,
    found: Mapping[int, Sequence[tuple[Gradients, Mapping[str, Slice]]]],
    losses: Sequence[float],
    first: int = 0,
    device: torch.device = _CPU,
) -> CheckRecord:
    """Train alone and compare every update's loss, and the gradients of those updates that the run `found`.

    `found` has of an update what every rank has: gradients, and of which it has only a part.
    """
    worst, where, worst_loss = 0.0, "", 0.0
    module = built.module

    def after_update(number: int, loss: float) -> None:
        nonlocal worst, where, worst_loss
        worst_loss = max(worst_loss, relative(abs(losses[number] - loss), abs(loss)))
        wanted = dict(module.named_parameters())
        for gradients, parts in found.get(number, ()):
            for name, gradient in gradients.items():
                expected = wanted[name].grad
                expected = torch.zeros_like(wanted[name]) if expected is None else expected
                expected = expected.to(gradient.device)
                size = largest(expected)
                if name in parts:
                    expected = expected.narrow(parts[name].dim, parts[name].start, parts[name].size)
                difference = relative(largest(gradient - expected), size)
                if difference > worst or not where:
                    worst, where = difference, f"{name}, update {number}"

    with fitting(device):
        train_stale(
            built,
            batches,
            sizes=sizes,
            held=held,
            optimizer=optimizer,
            after_update=after_update,
            first=first,
            device=device,
        )
    return CheckRecord(
        steps=len(batches),
        gradient_difference=worst,
        parameter=where,
        loss_difference=worst_loss,
        tolerance=tolerance((item.dtype for item in module.parameters()), same_order=True),
    )
