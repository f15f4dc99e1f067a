"""A whole model in one process on one device, as a run is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.runtime.microbatches import InputSpec, split_inputs, split_targets

__all__ = ["WholeModel", "fitting"]


class WholeModel:
    """Runs micro-batches of a mini-batch on a device, where its module is moved.

    The module runs as it is; if it draws random numbers it is captured instead, whole, because only so can every
    draw be seeded as in the pipeline. That holds for ranks on the same kind of device: a GPU draws other numbers
    than a CPU.
    """

    def __init__(self, built: BuiltModel, sizes: Sequence[int], device: torch.device) -> None:
        self._module, self._sizes, self._device = built.module, tuple(sizes), device
        self._captured = capture(built.module, built.args, built.kwargs, check=False)
        self._spec = InputSpec.of(self._captured)
        runs = {size: self._captured.at(size) for size in set(sizes)}
        built.module.to(device).train()
        self._stages = {
            size: one.stage(0, len(one.layers) - 1, device=device).to(device) for size, one in runs.items()
        }
        self._random = any(stage.stage_spec.random for stage in self._stages.values())

    def split(self, inputs: Any, target: Any) -> tuple[list[list[Any]], Sequence[Any]]:
        """Leaves and target of every micro-batch, on the device."""
        needed = set(range(len(self._spec.batched)))
        parts = split_inputs(self._spec, inputs, self._sizes, needed=needed)
        leaves = [[leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in part] for part in parts]
        return leaves, split_targets(target, self._sizes, self._device)

    def run(
        self, leaves: list[Any], microbatch: int, position: Position, weights: Mapping[str, Tensor] | None = None
    ) -> Any:
        """The output for a micro-batch, `weights` instead of the module's own; seeded for that position."""
        others = dict(weights or {})
        if not self._random:
            return functional_call(self._module, others, *self._spec.call(leaves))
        stage = self._stages[self._sizes[microbatch]]
        stage.rng_position = position
        roots = tuple(leaves[root.index] for root in stage.stage_spec.roots)
        own = {name: others[name] for name, _ in stage.named_parameters() if name in others}
        return self._captured.output(functional_call(stage, own, roots))


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
