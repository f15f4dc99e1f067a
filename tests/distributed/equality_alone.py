"""The truth to compare with: plain training by one process over the same micro-batches, in order."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from equality_models import SUBJECTS, as_call, make_batch
from equality_plans import Case
from torch import Tensor, nn

from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.torch_internals import flatten, unflatten

__all__ = ["LEARNING_RATE", "Alone", "make_optimizer", "train_alone"]

LEARNING_RATE = 1e-3
Share = tuple[int, int, tuple[int, ...]]
"""(k, r, dealing): of the micro-batches those of replica k of r that are dealt so; empty: in turn"""
ALL: Share = (0, 1, ())
Forward = Callable[[Any, int, int], Any]
"""(inputs, step, micro-batch) -> what the model returns"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What one process has after each step."""

    losses: list[float]
    evaluated: list[float]
    """losses in evaluation mode of the same global batches, after the steps"""
    gradients: list[dict[str, Tensor]]
    """summed over the steps so far; those without one are left out. Empty where weights are updated"""
    buffers: dict[Share, list[dict[str, Tensor]]]
    """as they are if only that share of the micro-batches has been run"""
    weights: dict[str, Tensor]
    """at the end, buffers too"""


def make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_alone(case: Case, captured: Captured, *, shares: Sequence[Share]) -> Alone:
    """The module itself in eager, micro-batch by micro-batch, losses weighted as in the whole global batch.

    With dropout the uncut graph, whose random nodes are seeded by step and micro-batch as the pipeline's are. The
    captured model is left as it is. `shares` says whose batch-norm statistics to follow besides its own.
    """
    module, forward = _forward(case, captured)
    optimizer = None if case.training == "accumulate" else make_optimizer(case.training, module.parameters())
    losses, evaluated, gradients = [], [], []
    buffers: dict[Share, list[dict[str, Tensor]]] = {ALL: []}
    for step in range(case.steps):
        loss, found = _step(case, module, forward, step)
        losses.append(loss)
        buffers[ALL].append(_saved_buffers(module))
        if optimizer is None:
            before = gradients[-1] if gradients else {}
            gradients.append({name: before[name] + item if before else item for name, item in found.items()})
        else:
            for name, parameter in module.named_parameters():
                parameter.grad = found.get(name)
            optimizer.step()
        evaluated.append(_evaluation(case, copy.deepcopy(module), step))
    for share in shares:
        if share != ALL:
            buffers[share] = _statistics(case, captured, share)
    weights = {name: item.detach().clone() for name, item in module.state_dict().items()}
    return Alone(losses=losses, evaluated=evaluated, gradients=gradients, buffers=buffers, weights=weights)


def _forward(case: Case, captured: Captured) -> tuple[nn.Module, Forward]:
    module = copy.deepcopy(captured.module)
    if case.numbers != "dropout":

        def eager(inputs: Any, step: int, microbatch: int) -> Any:  # noqa: ARG001
            args, kwargs = as_call(inputs)
            return module(*args, **kwargs)

        return module, eager
    own = dataclasses.replace(captured, module=module)
    uncut = own.stage(0, len(own.layers) - 1)

    def seeded(inputs: Any, step: int, microbatch: int) -> Any:
        uncut.rng_position = (step, microbatch)
        leaves = own.input_leaves(*as_call(inputs))
        return own.output(uncut(*(leaves[root.index] for root in uncut.stage_spec.roots)))

    return module, seeded


def _step(case: Case, module: nn.Module, forward: Forward, step: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one global batch."""
    loss_fn, samples = SUBJECTS[case.model].loss, sum(case.sizes)
    module.zero_grad()
    total, count = 0.0, 0
    for microbatch, (inputs, target) in enumerate(microbatches(case, step)):
        output = forward(inputs, step, microbatch)
        loss = _own_loss(output) if loss_fn is None else loss_fn(output, target)
        if isinstance(loss, tuple):
            count += int(loss[1])
            loss = loss[0]
        else:
            loss = loss * (case.sizes[microbatch] / samples)
        loss.backward()
        total += loss.item()
    divisor = count or 1
    found = {name: item.grad / divisor for name, item in module.named_parameters() if item.grad is not None}
    return total / divisor, found


def _evaluation(case: Case, module: nn.Module, step: int) -> float:
    """The loss of a global batch in evaluation mode, in eager."""
    loss_fn, samples = SUBJECTS[case.model].loss, sum(case.sizes)
    total, count = 0.0, 0
    module.eval()
    with torch.no_grad():
        for (inputs, target), size in zip(microbatches(case, step), case.sizes, strict=True):
            args, kwargs = as_call(inputs)
            output = module(*args, **kwargs)
            loss = _own_loss(output) if loss_fn is None else loss_fn(output, target)
            if isinstance(loss, tuple):
                total, count = total + loss[0].item(), count + int(loss[1])
            else:
                total += loss.item() * size / samples
    return total / (count or 1)


def _own_loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def microbatches(case: Case, step: int) -> Iterator[tuple[Any, Any]]:
    """The global batch of a step, cut by hand."""
    leaves, structure = flatten(make_batch(case.model, case.numbers, step, sum(case.sizes)))
    first = 0
    for size in case.sizes:
        part = [leaf[first : first + size] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        yield unflatten(part, structure)
        first += size


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict()
    return {name: item.clone() for name, item in module.named_buffers() if name in saved}


def _statistics(case: Case, captured: Captured, share: Share) -> list[dict[str, Tensor]]:
    replica, count, dealing = share
    module, forward = _forward(case, captured)
    found = []
    for step in range(case.steps):
        for microbatch, (inputs, _) in enumerate(microbatches(case, step)):
            if (dealing[microbatch % len(dealing)] if dealing else microbatch % count) == replica:
                with torch.no_grad():
                    forward(inputs, step, microbatch)
        found.append(_saved_buffers(module))
    return found
