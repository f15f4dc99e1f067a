"""What every run of units takes and holds, as tables: costs of many plans at once are looked up, not summed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats
from bapipe.costs.stage_memory import every_stage_bytes
from bapipe.costs.stage_time import StageSeconds

__all__ = ["RunBytes", "RunSeconds", "StageTables"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSeconds:
    """Seconds of every run of units, [first, last], on the slowest of some accelerator types."""

    forward: Floats
    backward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    """with what it costs to part the backward"""
    update: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunBytes:
    """Bytes of every run of units, [first, last], by the names of `StageBytes`."""

    weights: Floats
    trained: Floats
    casts: Floats
    saved_activations: Floats
    kept: Floats
    received: Floats
    answered: Floats
    sent: Floats
    returned: Floats
    workspace: Floats
    forward_workspace: Floats
    backward_workspace: Floats

    def static(self, copies: float) -> Floats:
        """As `HeldBytes.static`."""
        return copies * self.trained + (self.weights - self.trained)


@dataclass(frozen=True, slots=True, eq=False)
class StageTables:
    """The tables of one chain, each made when it is first asked for. Cost of each: O(units²)."""

    chain: Chain
    _seconds: dict[frozenset[int], RunSeconds] = field(default_factory=dict)
    _bytes: dict[bool, RunBytes] = field(default_factory=dict)

    def seconds(self, rows: frozenset[int]) -> RunSeconds:
        """On replicas of these types."""
        if rows not in self._seconds:
            units = np.arange(len(self.chain))
            found = StageSeconds(
                chain=self.chain, first=units[:, None], last=units[None, :], rows=np.array(sorted(rows))
            )
            self._seconds[rows] = RunSeconds(
                forward=found.forward,
                backward=found.backward,
                input_gradient=found.backward - found.weight_gradient,
                weight_gradient=found.weight_gradient + found.parting,
                update=found.update,
            )
        return self._seconds[rows]

    def bytes(self, *, parted: bool) -> RunBytes:
        """Of stages whose backward is parted, or is not."""
        if parted not in self._bytes:
            self._bytes[parted] = RunBytes(**every_stage_bytes(self.chain, parted=parted))
        return self._bytes[parted]
