"""The same training in one process, and how far a run is from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.records.run_record import CheckRecord, Compared
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.stage.loss import LossSum, loss_of_step
from bapipe.torch.stage.loss_weighing import Weighed, Weighing
from bapipe.torch.verify.single_process import WholeModel, fitting

__all__ = [
    "AloneResult",
    "Gradients",
    "Scaled",
    "compare_gradients",
    "copied",
    "gradients",
    "joined",
    "largest",
    "relative",
    "tolerance",
    "train_alone",
]

Gradients = dict[str, Tensor]
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""relative, where both add up in the same order"""
_OTHER_ORDER = {torch.float64: 1e-12, torch.float32: 1e-4}
"""relative, of a whole global batch and its micro-batches"""
_COARSE = 1e-2
"""relative, of any other dtype"""
_CPU = torch.device("cpu")


def gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """A copy of every parameter's gradient in host memory by name; zeros where none came."""
    named = dict(named_parameters)
    return copied(named.items(), {name: parameter.grad for name, parameter in named.items()})


def copied(named_parameters: Iterable[tuple[str, nn.Parameter]], found: Mapping[str, Tensor | None]) -> Gradients:
    """A copy of these gradients in host memory; zeros where a parameter has none."""
    copies = {}
    for name, parameter in named_parameters:
        own = found[name]
        none = torch.zeros_like(parameter, device=_CPU)
        copies[name] = none if own is None else own.detach().to(_CPU, copy=True)
    return copies


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


def tolerance(dtypes: Iterable[torch.dtype], *, same_order: bool) -> float:
    """The relative difference that the coarsest of these dtypes allows."""
    allowed = _TOLERANCES if same_order else _OTHER_ORDER
    return max((allowed.get(dtype, _COARSE) for dtype in dtypes), default=1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """How a run scaled the loss of one step."""

    scale: float | None = None
    """None: not at all"""
    skipped: bool = False
    """whether its gradients overflowed, and it changed no weight"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneResult:
    """In which way one process has trained."""

    compared: Compared
    misweighed: float
    """where it had to weigh micro-batches: how far losses weighed so, in evaluation mode, are from the whole's"""
    dtypes: frozenset[torch.dtype]
    """that it computes gradients in"""


def train_alone(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    optimizer: torch.optim.Optimizer | None,
    before_update: Callable[[int, float], None],
    device: torch.device = _CPU,
    autocast: torch.dtype | None = None,
    scales: Sequence[Scaled] = (),
) -> AloneResult:
    """Train the whole model on one device, each global batch with one loss of all its samples and one backward.

    Before each update `before_update(step, loss)` is called, with the gradients in the parameters. A model that
    draws random numbers or normalises by statistics of the batch has its outputs computed in the micro-batches of
    the pipeline, and the loss is that of all outputs. Only where it also returns its loss itself, or computes in
    16 bits, must losses of micro-batches be weighed as the pipeline weighs them. With `autocast` forwards and
    losses are cast to it, and with `scales` losses are scaled as in the run.
    """
    alone = _Alone(built, sizes, device, autocast)
    for step, (inputs, target) in enumerate(batches):
        built.module.zero_grad(set_to_none=True)
        scaled = scales[step] if scales else Scaled()
        loss = alone.step(inputs, target, step, scaled.scale)
        before_update(step, loss)
        if optimizer is not None and not scaled.skipped:
            optimizer.step()
    return AloneResult(compared=alone.compared, misweighed=alone.misweighed, dtypes=alone.dtypes)


class _Alone:
    """One process, in the way that the model allows."""

    def __init__(
        self, built: BuiltModel, sizes: Sequence[int], device: torch.device, autocast: torch.dtype | None = None
    ) -> None:
        self._whole = WholeModel(built, sizes, device, autocast)
        self._module, self._sizes = built.module, tuple(sizes)
        self._own_loss = built.loss is None
        self._weighing = Weighing(built.loss, self._whole.own_loss, warns=False)
        self.compared: Compared = "outputs" if self._whole.apart else "whole"
        if any(dtype not in _OTHER_ORDER for dtype in self._whole.dtypes):
            self.compared = "microbatches"  # in bfloat16 another order of sums is another gradient
        self.misweighed = 0.0
        self.dtypes = self._whole.dtypes

    def step(self, inputs: Any, target: Any, step: int, scale: float | None = None) -> float:
        """Gradients into the parameters; the loss."""
        with self._whole.batch():
            return self._step(inputs, target, step, scale)

    def _step(self, inputs: Any, target: Any, step: int, scale: float | None) -> float:
        loss = self._loss(inputs, target, step)
        if loss is None:
            return self._in_microbatches(inputs, target, step, scale)
        if not loss.isnan():  # nothing was counted; the gradients are 0
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _loss(self, inputs: Any, target: Any, step: int) -> Tensor | None:
        if self.compared == "whole":
            try:
                return self._whole.whole_loss(inputs, target)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if self._whole.any_size:
                    raise
                self.compared = "outputs"  # the model's code is for micro-batches of its example's size only
        if self.compared == "outputs":
            found = self._whole.joined_loss(inputs, target, step)
            if found is not None:
                return found
            self.compared = "microbatches"
        return None

    def _in_microbatches(self, inputs: Any, target: Any, step: int, scale: float | None) -> float:
        leaves, targets = self._whole.split(inputs, target)
        sums, weighed = LossSum(self._weighing, self._sizes), list[Weighed]()
        sums.scale = None if scale is None else torch.tensor(scale, device=self._whole.device)
        for index, part in enumerate(leaves):
            output, tokens = self._run(part, index, (step, index))
            with self._whole.casting():
                loss = sums.of(output, targets[index], index, count=True, tokens=tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad(), self._whole.casting():
                weighed.append(self._weighing(output, targets[index], self._sizes[index], tokens))
        totals = sums.sums()
        divisor = totals.divisor()
        self._compare_weights(inputs, target, weighed)
        for parameter in self._module.parameters():
            if divisor and parameter.grad is not None:
                parameter.grad /= divisor
            if scale is not None and parameter.grad is not None:
                parameter.grad /= scale
        return totals.loss / divisor if divisor else totals.loss

    def _run(self, leaves: list[Any], microbatch: int, position: tuple[int, int]) -> tuple[Any, Tensor | None]:
        if self._own_loss:
            return self._whole.run_captured(leaves, microbatch, position)
        return self._whole.run(leaves, microbatch, position), None

    def _compare_weights(self, inputs: Any, target: Any, weighed: Sequence[Weighed]) -> None:
        """In evaluation mode a model draws no numbers, so there the weights can be had from the whole."""
        whole, outputs = self._whole.evaluated(inputs, target)
        _, targets = self._whole.split(inputs, target)
        losses = [float(self._whole.loss_of(*pair)) for pair in zip(outputs, targets, strict=True)]
        weights = [
            float(item.count) if item.kind == "counted" else float(size) if item.kind == "mean" else 0.0
            for item, size in zip(weighed, self._sizes, strict=True)
        ]
        known = [
            0.0 if math.isnan(loss) and not weight else loss for loss, weight in zip(losses, weights, strict=True)
        ]
        found = loss_of_step(known, weights)
        difference = relative(abs(found - float(whole)), abs(float(whole)))
        if difference > 4 * torch.finfo(whole.dtype).eps:
            self.misweighed = max(self.misweighed, difference)


def compare_gradients(
    built: BuiltModel,
    batches: Sequence[tuple[Any, Any]],
    *,
    sizes: Sequence[int],
    optimizer: torch.optim.Optimizer | None,
    found: Sequence[Gradients],
    losses: Sequence[float],
    device: torch.device = _CPU,
    autocast: torch.dtype | None = None,
    scales: Sequence[Scaled] = (),
) -> CheckRecord:
    """Train alone and compare every parameter's gradient and the loss of every step with what the run `found`.

    A gradient that is noise, under a thousandth of the largest of all, is compared relative to that thousandth.
    The updates are made with the gradients that were found: rounding, which Adam makes large where a gradient is
    almost 0, must not add up from step to step. Of a step that the run skipped, because a gradient overflowed, it
    is compared whether one overflows here too. `autocast` and `scales` are as in `train_alone`.
    """
    worst, where, worst_loss = 0.0, "", 0.0
    module = built.module

    def before_update(step: int, total: float) -> None:
        nonlocal worst, where, worst_loss
        expected = gradients(module.named_parameters())
        if scales and scales[step].skipped:
            if all(bool(value.isfinite().all()) for value in expected.values()):
                worst, where = sys.float_info.max, f"no overflow in one process, step {step}"
            return
        scale = max(map(largest, expected.values()), default=0.0)
        unused = {name for name, value in expected.items() if name not in found[step] and not value.any()}
        missing = (expected.keys() - unused) ^ found[step].keys()
        assert not missing, f"gradients of {sorted(missing)[:3]} are on one side only"
        for name, wanted in expected.items():
            if name in unused:
                continue
            difference = relative(largest(found[step][name] - wanted), max(largest(wanted), scale / 1000))
            if difference > worst or not where:
                worst, where = difference, f"{name}, step {step}"
        if not (math.isnan(total) and math.isnan(losses[step])):
            worst_loss = max(worst_loss, relative(abs(losses[step] - total), abs(total)))
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and name in found[step]:
                parameter.grad.copy_(found[step][name])

    with fitting(device):
        alone = train_alone(
            built,
            batches,
            sizes=sizes,
            optimizer=optimizer,
            before_update=before_update,
            device=device,
            autocast=autocast,
            scales=scales,
        )
    return CheckRecord(
        steps=len(batches),
        gradient_difference=worst,
        parameter=where,
        loss_difference=max(worst_loss, alone.misweighed),
        tolerance=tolerance(alone.dtypes, same_order=alone.compared == "microbatches"),
        compared=alone.compared,
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
