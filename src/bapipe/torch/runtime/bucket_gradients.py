"""Gradients under DDP that are parts of its buckets from the start on, so that each is there once.

With `gradient_as_bucket_view` a gradient becomes part of the bucket that is summed only in a backward that sums.
One that was None before is made beside the bucket, and stays there while micro-batches are accumulated: a second
copy of all gradients. Here none is ever None: while DDP lays out its buckets it finds gradients to move into them,
zeros that take no memory, and between steps they are filled with zeros.

DDP lays out buckets twice: when it is made, one for all, and after the first step, in the order in which gradients
came. Left to itself it moves gradients from the old to the new ones, and has both.

Uses a private part of torch, written against 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BucketGradients"]


class BucketGradients:
    """The gradients of these parameters, which get one in every step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._steps = 0

    @contextlib.contextmanager
    def laid_out(self) -> Iterator[None]:
        """Meanwhile DDP lays out buckets: gradients are zeros in them afterwards, or None where it did not."""
        for parameter in self._parameters:
            parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)
        yield
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().nbytes() < parameter.nbytes:
                parameter.grad = None

    def clear(self, ddp: DistributedDataParallel) -> None:
        """Zeros before a step. All ranks call it."""
        self._steps += 1
        if self._steps == 2:
            with self.laid_out():
                ddp.reducer._rebuild_buckets()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
