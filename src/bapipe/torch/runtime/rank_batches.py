"""A global batch on one rank: what it was given of it, cut into the micro-batches that run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.runtime.batch_layout import BatchLayout, filled
from bapipe.torch.runtime.microbatches import InputSpec, split_inputs, split_targets

__all__ = ["MicroBatches", "RankBatch", "RankNeeds", "cut_batch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBatch:
    """What one rank needs of a global batch: `Pipeline.data_loader` yields it, `step` and `evaluate` take it."""

    samples: int
    """of the whole global batch"""
    parts: Mapping[int, tuple[Any, Any]]
    """micro-batch -> its inputs and targets, of those that this rank needs; None in place of what it does not"""

    def __len__(self) -> int:
        """Samples of the whole global batch."""
        return self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """Which data one rank needs."""

    rank: int
    inputs: frozenset[int]
    """leaves of the model's inputs that its stages take"""
    stages: tuple[int, ...]
    """of its stages, those that take inputs"""
    targets: int | None
    """the last stage, where this rank has it and its loss takes targets; None: it needs no targets"""
    schedule: Schedule

    def of_microbatch(self, microbatch: int) -> tuple[bool, bool]:
        """Whether it needs the inputs, and the targets, of a micro-batch."""
        rank_of = self.schedule.rank_of
        return (
            any(rank_of(stage, microbatch) == self.rank for stage in self.stages),
            self.targets is not None and rank_of(self.targets, microbatch) == self.rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """A global batch, cut."""

    layout: BatchLayout | None
    """None: this rank was given nothing that says it"""
    inputs: Sequence[Sequence[Any]]
    """each micro-batch's leaves, as far as this rank needs them; empty where it needs none"""
    targets: Sequence[Any]
    """each micro-batch's target; empty where this rank was given none"""


def cut_batch(
    spec: InputSpec,
    planned: Sequence[int],
    needs: RankNeeds,
    device: torch.device,
    inputs: Any,
    targets: Any,
    *,
    lengths: Sequence[int] = (),
) -> MicroBatches:
    """Cut what this rank was given. `device` is where targets go, `lengths` are those that sequences may have
    beside the example's. Raises BaPipeError where it cannot be run."""
    if isinstance(inputs, RankBatch):
        if targets is not None:
            raise BaPipeError("a batch of data_loader has its targets in it, got targets besides; give it alone")
        return _cut_parts(spec, planned, needs, device, inputs, lengths)
    if needs.inputs and inputs is None:
        raise BaPipeError(f"rank {needs.rank} needs the inputs, got None; give every rank the global batch")
    samples = _samples(spec, inputs, targets)
    if samples is None:
        return MicroBatches(layout=None, inputs=(), targets=())
    length = None if inputs is None or not lengths else _length(spec, inputs, lengths)
    layout = BatchLayout(sizes=filled(planned, samples), length=length)
    leaves: list[list[Any]] = []
    # A rank that needs none of it looks at it all the same, so that all ranks refuse a wrong one.
    if inputs is not None:
        leaves = split_inputs(spec, inputs, layout.sizes, needed=set(needs.inputs), length=length)
    own_targets = [] if targets is None else split_targets(targets, layout.sizes, device)
    return MicroBatches(layout=layout, inputs=leaves, targets=own_targets)


def _samples(spec: InputSpec, inputs: Any, targets: Any) -> int | None:
    """How many samples a rank was given; None: nothing that says it."""
    leaves = (
        []
        if inputs is None
        else [leaf for leaf, batched in zip(spec.leaves(inputs), spec.batched, strict=True) if batched]
    )
    for leaf in (*leaves, *flatten(targets)[0]):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return None


def _length(spec: InputSpec, inputs: Any, lengths: Sequence[int]) -> int | None:
    """Positions of the sequences of a batch; None: as in the example."""
    found = spec.length_of(inputs)
    if found is None or found == spec.length:
        return None
    if found not in lengths:
        known = sorted({*lengths, *(() if spec.length is None else (spec.length,))})
        raise BaPipeError(
            f"the batch has sequences of {found}, the pipeline was made for {', '.join(map(str, known))}; pad to "
            "one of them, or add it to lengths"
        )
    return found


def _cut_parts(
    spec: InputSpec,
    planned: Sequence[int],
    needs: RankNeeds,
    device: torch.device,
    batch: RankBatch,
    lengths: Sequence[int],
) -> MicroBatches:
    sizes = filled(planned, batch.samples)
    found: set[int | None] = set()
    inputs: list[Any] = [()] * len(sizes)
    targets: list[Any] = [None] * len(sizes)
    for number, size in enumerate(sizes):
        wants_inputs, wants_targets = needs.of_microbatch(number)
        part, target = batch.parts.get(number, (None, None))
        if (wants_inputs and part is None) or (wants_targets and target is None):
            raise BaPipeError(
                f"rank {needs.rank} needs the {'inputs' if part is None else 'targets'} of micro-batch {number}, "
                "the batch has none; give it a batch of its own data_loader"
            )
        if wants_inputs:
            length = _length(spec, part, lengths) if lengths else None
            found.add(length)
            inputs[number] = split_inputs(spec, part, (size,), needed=set(needs.inputs), length=length)[0]
        if wants_targets:
            targets[number] = split_targets(target, (size,), device)[0]
    if len(found) > 1:
        several = sorted(spec.length or 0 if item is None else item for item in found)
        raise BaPipeError(
            f"the micro-batches of a global batch have sequences of {', '.join(map(str, several))}; pad all of "
            "it to the same"
        )
    return MicroBatches(
        layout=BatchLayout(sizes=sizes, length=found.pop() if found else None),
        inputs=inputs if needs.inputs else (),
        targets=targets if needs.targets is not None else (),
    )
