"""The host's time to issue each layer as one of a step's: forwards in order, then backwards, nothing waited for.

Alone and after a pause a layer is issued more slowly than in a step, where the interpreter, the allocator and
autograd's thread are busy with the like of it. Where a GPU waits for its host, that is the step's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.profiler.layer_runner import RunnableLayer
from bapipe.torch.profiler.statistics import SampleSummary, summarise

__all__ = ["StepIssue", "empty_issue"]

_ROW = 12
"""empty layers in a row"""
_SAMPLES = 25


class StepIssue:
    """A step of all pieces in a row, each timed by the host; call it again and again.

    What crosses a cut is handed on as it is and the backward is one call, as in a stage; a hook on what each piece
    makes tells when it is passed. (A call for each piece would wake autograd's thread each time: that added 5 to
    12 % to a step that waits for its host.) Gradients are added to those that are there.
    Where the device is behind by all that its queue holds, the host is made to wait; it is then ahead anyhow, and
    `run_ahead` takes no harm.
    """

    def __init__(
        self, pieces: Sequence[RunnableLayer], leaves: Sequence[Any], values: Sequence[Tensor] = ()
    ) -> None:
        self.pieces = pieces
        self.leaves = leaves
        self.values = tuple(values)
        """that the first piece receives"""
        self.errors: list[Tensor] = []
        self.forward: list[list[float]] = [[] for _ in pieces]
        self.backward: list[list[float]] = [[] for _ in pieces]

    def __call__(self, *, keep: bool = True) -> None:
        """One step; `keep`: its times count."""
        ahead, back = self._step()
        if keep:
            for taken, kept in ((ahead, self.forward), (back, self.backward)):
                for own, samples in zip(taken, kept, strict=True):
                    samples.append(own)

    def summaries(self) -> tuple[tuple[SampleSummary, ...], tuple[SampleSummary, ...]]:
        """Of each piece's forward and backward."""
        return tuple(map(summarise, self.forward)), tuple(map(summarise, self.backward))

    def _step(self) -> tuple[list[float], list[float]]:
        ahead = [0.0] * len(self.pieces)
        passed: list[float | None] = [None] * len(self.pieces)
        values: Sequence[Any] = self.values
        for index, piece in enumerate(self.pieces):
            received = [_joined(value, flag) for value, flag in zip(values, piece.receives, strict=True)]
            given = [value.clone() for value in received] if piece.overwrites else received
            roots = [self.leaves[root] for root in piece.roots]
            begun = time.perf_counter()
            values = piece.run(*given, *roots)
            ahead[index] = time.perf_counter() - begun
            known = {id(value) for value in given}
            for value in values if index + 1 < len(self.pieces) else ():
                if isinstance(value, Tensor) and value.requires_grad and id(value) not in known:
                    value.register_hook(partial(_note, passed, index))  # type: ignore[no-untyped-call]
        outputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        if not self.errors:
            self.errors = [torch.randn_like(value) / max(1, value.numel()) ** 0.5 for value in outputs]
        begun = time.perf_counter()
        if outputs:
            torch.autograd.backward(outputs, self.errors)
        return ahead, _between(begun, passed, time.perf_counter())


def _joined(value: Tensor, gradient: bool) -> Tensor:
    """The value as the next piece takes it: still part of the graph, unless no gradient goes back for it."""
    return value if value.requires_grad == gradient else value.detach().requires_grad_(gradient)


def _note(passed: list[float | None], index: int, _: Tensor) -> None:
    """The gradient of something that piece `index` made is there: the pieces after it are done."""
    passed[index] = time.perf_counter()


def _between(begun: float, passed: Sequence[float | None], end: float) -> list[float]:
    """Each piece's part of the one backward, from its outputs' gradients being there to its inputs'."""
    back = [0.0] * len(passed)
    last = begun
    for index in reversed(range(1, len(passed))):
        now = passed[index - 1]
        if now is not None and now > last:
            back[index], last = now - last, now
    back[0] = end - last
    return back


def empty_issue(piece: RunnableLayer, inputs: Sequence[Tensor]) -> tuple[SampleSummary, SampleSummary]:
    """Forward and backward of a layer that does nothing, in a row of its like: what issuing one by one adds."""
    step = StepIssue([piece] * _ROW, (), inputs)
    for sample in range(2 * _SAMPLES):
        step(keep=sample >= _SAMPLES)
    forward, backward = step.summaries()
    return _all(forward), _all(backward)


def _all(row: Sequence[SampleSummary]) -> SampleSummary:
    """One of the row."""
    return summarise([item.median for item in row])
