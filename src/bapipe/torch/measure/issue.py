"""The host's time to issue each layer as one of a step's: forwards in order, then backwards, nothing waited for.

Alone and after a pause a layer is issued more slowly than in a step, where the interpreter, the allocator and
autograd's thread are busy with the like of it. Where a GPU waits for its host, that is the step's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.measure.chain import Piece
from bapipe.torch.measure.statistics import Summary, summarise

__all__ = ["StepIssue", "empty_issue"]

_ROW = 12
"""empty layers in a row"""
_SAMPLES = 25


class StepIssue:
    """A step of all pieces in a row, each timed by the host; call it again and again.

    What crosses a cut is handed on as it is, as a leaf of autograd. Gradients are added to those that are there.
    Where the device is behind by all that its queue holds, the host is made to wait; it is then ahead anyhow, and
    `run_ahead` takes no harm.
    """

    def __init__(self, pieces: Sequence[Piece], leaves: Sequence[Any], values: Sequence[Tensor] = ()) -> None:
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

    def summaries(self) -> tuple[tuple[Summary, ...], tuple[Summary, ...]]:
        """Of each piece's forward and backward."""
        return tuple(map(summarise, self.forward)), tuple(map(summarise, self.backward))

    def _step(self) -> tuple[list[float], list[float]]:
        ahead, back = [0.0] * len(self.pieces), [0.0] * len(self.pieces)
        passed: list[tuple[list[Tensor], Sequence[Any]]] = []
        values: Sequence[Any] = self.values
        for index, piece in enumerate(self.pieces):
            received = [
                value.detach().requires_grad_(flag) for value, flag in zip(values, piece.receives, strict=True)
            ]
            given = [value.clone() for value in received] if piece.overwrites else received
            roots = [self.leaves[root] for root in piece.roots]
            begun = time.perf_counter()
            values = piece.run(*given, *roots)
            ahead[index] = time.perf_counter() - begun
            passed.append((received, values))
        outputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        if not self.errors:
            self.errors = [torch.randn_like(value) / max(1, value.numel()) ** 0.5 for value in outputs]
        ends = list(zip(outputs, self.errors, strict=True))
        for index in reversed(range(len(self.pieces))):
            received, _ = passed.pop()
            if ends:
                tensors, errors = [value for value, _ in ends], [error for _, error in ends]
                begun = time.perf_counter()
                torch.autograd.backward(tensors, errors)
                back[index] = time.perf_counter() - begun
                del tensors, errors
            sent = passed[-1][1] if passed else ()
            ends = [
                (value, leaf.grad)
                for value, leaf in zip(sent, received, strict=False)
                if isinstance(value, Tensor) and value.requires_grad and leaf.grad is not None
            ]
        return ahead, back


def empty_issue(piece: Piece, inputs: Sequence[Tensor]) -> tuple[Summary, Summary]:
    """Forward and backward of a layer that does nothing, in a row of its like: what issuing one by one adds."""
    step = StepIssue([piece] * _ROW, (), inputs)
    for sample in range(2 * _SAMPLES):
        step(keep=sample >= _SAMPLES)
    forward, backward = step.summaries()
    return _all(forward), _all(backward)


def _all(row: Sequence[Summary]) -> Summary:
    """One of the row."""
    return summarise([item.median for item in row])
