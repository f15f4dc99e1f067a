"""A whole model in one process on one device, as a run is compared with.

Nothing here weighs the losses of micro-batches: the loss is that of the whole global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.loss_graph import own_loss
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.capturing.torch_internals import argument_names, flatten, op_name, unflatten
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.runtime.microbatches import InputSpec, split_inputs, split_targets

__all__ = ["WholeModel", "fitting"]


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class WholeModel:
    """Runs a global batch or its micro-batches on a device, where its module is moved.

    The module runs as it is; if it draws random numbers it is captured instead, whole, because only so can every
    draw be seeded as in the pipeline. That holds for ranks on the same kind of device: a GPU draws other numbers
    than a CPU.
    """

    def __init__(
        self, built: BuiltModel, sizes: Sequence[int], device: torch.device, autocast: torch.dtype | None = None
    ) -> None:
        """Forwards and losses are cast to the dtype of `autocast`, if any."""
        self._module, self._sizes, self._device = built.module, tuple(sizes), device
        self._mixed = None if autocast is None else MixedForward(device, autocast)
        self._loss = built.loss
        self._captured = capture(built.module, built.args, built.kwargs, check=False)
        self._spec = InputSpec.of(self._captured)
        runs = {size: self._captured.at(size) for size in set(sizes)}
        built.module.to(device).train()
        self._stages = {
            size: one.stage(0, len(one.layers) - 1, device=device, count_loss=True).to(device)
            for size, one in runs.items()
        }
        self.own_loss = own_loss(self._captured.program)
        """what the model returns as its loss, if anything"""
        self._random = any(stage.stage_spec.random for stage in self._stages.values())
        self.dtypes = _gradient_dtypes(built.module, self._captured) | ({autocast} if autocast else set())
        """that gradients are computed in"""
        self._mixes = _uses_batch_statistics(built.module, self._captured)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._device

    def batch(self) -> AbstractContextManager[object]:
        """Around a global batch, for which each weight is cast once."""
        return contextlib.nullcontext() if self._mixed is None else self._mixed.batch()

    def casting(self) -> AbstractContextManager[object]:
        """Around what is cast; without a graph, nothing that others would find there is kept."""
        if self._mixed is None:
            return contextlib.nullcontext()
        return self._mixed.forward(keep=torch.is_grad_enabled())

    @property
    def any_size(self) -> bool:
        """Whether the model's code takes any number of samples, as far as its capture knows."""
        return self._captured.dynamic

    @property
    def apart(self) -> bool:
        """Whether samples must be run in the same micro-batches as in the pipeline: it draws random numbers for
        each, or normalises them by their own statistics."""
        return self._random or self._mixes

    def split(self, inputs: Any, target: Any) -> tuple[list[list[Any]], Sequence[Any]]:
        """Leaves and target of every micro-batch, on the device."""
        needed = set(range(len(self._spec.batched)))
        parts = split_inputs(self._spec, inputs, self._sizes, needed=needed)
        leaves = [[leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in part] for part in parts]
        return leaves, split_targets(target, self._sizes, self._device)

    def whole_loss(self, inputs: Any, target: Any) -> Tensor:
        """The loss of all samples at once."""
        leaves, targets = self._all(inputs, target)
        args, kwargs = self._spec.call(leaves)
        with self.casting():
            output = self._module(*args, **kwargs)
        return self.loss_of(output, targets)

    def joined_loss(self, inputs: Any, target: Any, step: int) -> Tensor | None:
        """The loss of all samples, whose outputs were computed in micro-batches; None where it cannot be had so.

        That is where the model returns its loss itself, or anything else that is not of one sample each.
        """
        if self._loss is None:
            return None
        leaves, _ = self.split(inputs, target)
        outputs = [self.run(part, index, (step, index)) for index, part in enumerate(leaves)]
        taken = [flatten(output) for output in outputs]
        joined = []
        for parts in zip(*(found for found, _ in taken), strict=True):
            if all(isinstance(part, Tensor) for part in parts):
                sizes = [part.shape[0] if part.ndim else 0 for part in parts]
                if sizes != list(self._sizes):
                    return None
                joined.append(torch.cat(parts))
            else:
                joined.append(parts[0])
        return self.loss_of(unflatten(joined, taken[0][1]), self._all(inputs, target)[1])

    def evaluated(self, inputs: Any, target: Any) -> tuple[Tensor, list[Any]]:
        """In evaluation mode, without gradients: the loss of all samples, and the output of each micro-batch."""
        leaves, _ = self.split(inputs, target)
        self._module.eval()
        try:
            with torch.no_grad():
                whole = self.whole_loss(inputs, target)
                with self.casting():
                    return whole, [self._module(*args, **kwargs) for args, kwargs in map(self._spec.call, leaves)]
        finally:
            self._module.train()

    def _all(self, inputs: Any, target: Any) -> tuple[list[Any], Any]:
        samples = (sum(self._sizes),)
        parts = split_inputs(self._spec, inputs, samples, needed=set(range(len(self._spec.batched))))
        leaves = [leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in parts[0]]
        return leaves, split_targets(target, samples, self._device)[0]

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """The loss of what is given, by itself: the function's, a sum by its count, or what the model returns."""
        if self._loss is None:
            scalars = (leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.ndim == 0)
            return next(leaf for leaf in scalars if leaf.is_floating_point())
        with self.casting():
            found = self._loss(output, target)
        if isinstance(found, tuple):
            return torch.as_tensor(found[0] / found[1])
        return torch.as_tensor(found).reshape(())

    def run(
        self, leaves: list[Any], microbatch: int, position: Position, weights: Mapping[str, Tensor] | None = None
    ) -> Any:
        """The output for a micro-batch, `weights` instead of the module's own; seeded for that position."""
        others = dict(weights or {})
        if not self._random:
            with self.casting():
                return functional_call(self._module, others, *self._spec.call(leaves))
        return self.run_captured(leaves, microbatch, position, others)[0]

    def run_captured(
        self, leaves: list[Any], microbatch: int, position: Position, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, Tensor | None]:
        """As `run`, always of the capture: the output, and what the model's own loss is a mean over, if known."""
        stage = self._stages[self._sizes[microbatch]]
        stage.rng_position = position
        roots = tuple(leaves[root.index] for root in stage.stage_spec.roots)
        own = {name: tensor for name, tensor in (weights or {}).items() if name in dict(stage.named_parameters())}
        with self.casting():
            made = functional_call(stage, own, roots)
        leaves, tokens = (made[:-1], made[-1]) if stage.stage_spec.counts_loss else (made, None)
        return self._captured.output(leaves), tokens


def _gradient_dtypes(module: nn.Module, captured: Captured) -> frozenset[torch.dtype]:
    """Of parameters, and of values that have a gradient: code may compute in another dtype here and there."""
    values = (node.meta.get("val") for node in captured.program.gradients)
    made = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return frozenset(made | {item.dtype for item in module.parameters() if item.is_floating_point()})


def _uses_batch_statistics(module: nn.Module, captured: Captured) -> bool:
    """Whether samples are normalised by statistics of the batch that they are in."""
    if any(isinstance(item, _BATCH_NORMS) for item in module.modules()):
        return True
    return any(_is_batch_norm(node) for node in captured.program.steps)


def _is_batch_norm(node: fx.Node) -> bool:
    if "batch_norm" not in op_name(node.target):
        return False
    given = dict(zip(argument_names(node.target), node.args, strict=False)) | dict(node.kwargs)
    return bool(given.get("training", given.get("train", True)))


@contextlib.contextmanager
def fitting(device: torch.device) -> Iterator[None]:
    """Within, a whole model that does not fit on the device is a mistake that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BaPipeError(
            f"the whole model does not fit on {device}, so the run cannot be compared with one process there; "
            "check a smaller one, or drop --check"
        ) from error
