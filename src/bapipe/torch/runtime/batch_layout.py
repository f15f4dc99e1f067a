"""How a global batch lies in micro-batches: the planned ones, or fewer where it is short.

    planned 4 4 4 4, 16 samples   4 4 4 4
    planned 4 4 4 4, 10 samples   4 4 2      the last micro-batch is smaller, and the fourth is not run

Every rank must know it before the first action. The rank that runs the first micro-batch of the first stage has
the data, so it lets the next rank know, and so on, each without waiting for those behind it. A rank that is lost
is noticed by the one behind it, as where activations are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.comm import guarded

__all__ = ["BatchLayout", "LayoutAgreement", "filled"]

_TAG = 1 << 20
"""of announcements, above those of all channels"""
_KINDS = ("trains", "evaluates", "evaluates for outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The micro-batches of one global batch."""

    sizes: tuple[int, ...]
    """samples of those that are run, which are the first ones of the plan"""
    length: int | None = None
    """positions of their sequences; None: as in the example, or not known"""

    @property
    def samples(self) -> int:
        """Of the global batch."""
        return sum(self.sizes)


def filled(planned: Sequence[int], samples: int) -> tuple[int, ...]:
    """Samples of the micro-batches that are run: as planned, one after the other, until there are no more.

    Raises BaPipeError for more samples than planned, or none.
    """
    total = sum(planned)
    if not 0 < samples <= total:
        raise BaPipeError(
            f"the batch has {samples} samples, the plan is for a global batch of {total}; give 1 to {total}, or "
            "plan another --global-batch"
        )
    sizes, left = [], samples
    for size in planned:
        if left > 0:
            sizes.append(min(size, left))
        left -= size
    return tuple(sizes)


class _Said(NamedTuple):
    """What the rank that has the data says of a global batch."""

    kind: int
    step: int
    samples: int
    length: int
    """0: as in the example"""


class LayoutAgreement:
    """Lets all ranks know of each global batch what the one that has its data knows."""

    def __init__(self, planned: Sequence[int], *, rank: int, source: int) -> None:
        self._planned = tuple(planned)
        self._rank, self._source = rank, source
        self._world = dist.get_world_size()
        self._sent: tuple[dist.Work | None, Tensor] | None = None

    def layout(self, found: BatchLayout | None, *, kind: str, step: int) -> BatchLayout:
        """The layout of the global batch that all ranks begin; `found` is what this rank's data say, if they do.

        `kind` is what is done with it. Raises BaPipeError where this rank does something else than the others, or
        was given another batch. Only ranks that are not the source wait.
        """
        own = found or BatchLayout(sizes=self._planned)
        if self._world == 1:
            return own
        said = _Said(_KINDS.index(kind), step, own.samples, own.length or 0)
        tensor = torch.tensor(said, dtype=torch.int64)
        before, behind = (self._rank - 1) % self._world, (self._rank + 1) % self._world
        if self._rank != self._source:
            with guarded(before):
                dist.recv(tensor, before, tag=_TAG)
        if behind != self._source:
            with guarded(behind):
                self._sent = dist.isend(tensor, behind, tag=_TAG), tensor
        if self._rank == self._source:
            return own
        heard = _Said(*tensor.tolist())
        if (heard.kind, heard.step) != (said.kind, said.step):
            raise BaPipeError(
                f"rank {self._source} {_KINDS[heard.kind]} after {heard.step} steps, rank {self._rank} "
                f"{kind} after {step}; call the same on every rank"
            )
        if found is not None and heard.samples != found.samples:
            raise BaPipeError(
                f"rank {self._source} was given {heard.samples} samples, rank {self._rank} {found.samples}; give "
                "every rank the same global batch, or None where it needs none"
            )
        length = heard.length or None
        if found is not None and found.length not in (None, length):
            raise BaPipeError(
                f"rank {self._source} was given sequences of {length or 'another length'}, rank {self._rank} of "
                f"{found.length}; pad all of a global batch to the same"
            )
        return BatchLayout(sizes=filled(self._planned, heard.samples), length=length)

    def finish(self) -> None:
        """All ranks have heard of the last one: let go of it."""
        if self._sent is not None:
            work, _ = self._sent
            if work is not None:
                work.wait()
            self._sent = None
