"""Timeline: actions with start and end. A simulation predicts one, a run records one; both are measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bapipe.schedule.actions import Kind

__all__ = ["Timeline", "Transfers"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


_COMPUTES = np.isin(range(len(Kind)), [int(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)])
_GROWS = np.isin(range(len(Kind)), [int(Kind.F), int(Kind.R)])
_TAKES = np.full(len(Kind), -1)
_TAKES[[Kind.F, Kind.B, Kind.I]] = 0, 1, 1
"""by kind of action: whether it computes; whether it adds activations, when it starts; and what it takes: an
activation (0), an error (1) or neither (-1)"""
_RESOLUTION, _LEAST = 1e-15, 1e-290
"""of the whole time, and of any: spans that no clock tells from none"""


def _no_ints() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """What crossed between ranks: one entry per activation or error sent."""

    source: Ints
    """index of the action that made it"""
    to_rank: Ints
    start: Floats
    arrival: Floats
    target: Ints | None = None
    """index of the action that it feeds, or -1; None: `Timeline.consumers` finds it"""

    @classmethod
    def none(cls) -> Transfers:
        return cls(source=_no_ints(), to_rank=_no_ints(), start=np.zeros(0), arrival=np.zeros(0))

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Every action with its rank, lane, start and end, in seconds from the start of the global batch."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    kinds: Ints
    stages: Ints
    microbatches: Ints
    ranks: Ints
    lanes: Ints
    """0 for a rank's first lane, 1 for its second…"""
    start: Floats
    end: Floats
    work: Floats
    """time the action needs with its rank to itself; less than end − start where lanes share a rank"""
    transfers: Transfers
    period: float | None = None
    """steady time per global batch of a pipeline that never flushes; None for one that does"""

    @property
    def makespan(self) -> float:
        """From the start of the global batch to the end of its last action."""
        return float(self.end.max()) if len(self.end) else 0.0

    @property
    def time(self) -> float:
        """The makespan, or M steady periods where the pipeline never flushes."""
        return self.makespan if self.period is None else self.num_microbatches * self.period

    def spans(self) -> list[float]:
        """Each rank's time from its first start to its last end."""
        first, last = np.full(self.num_ranks, np.inf), np.full(self.num_ranks, -np.inf)
        np.minimum.at(first, self.ranks, self.start)
        np.maximum.at(last, self.ranks, self.end)
        return [float(span) for span in np.maximum(last - first, 0.0)]

    def busy(self) -> list[float]:
        """Each rank's time at work; all-reduce is communication and does not count."""
        counted = np.where(self.kinds == Kind.A, 0.0, self.work)
        return [float(total) for total in np.bincount(self.ranks, counted, minlength=self.num_ranks)]

    @property
    def bubble(self) -> float:
        """1 − Σ busy / (ranks · time)."""
        time = self.time
        return 1.0 - sum(self.busy()) / (self.num_ranks * time) if time > 0 else 0.0

    def exposed_communication(self) -> list[float]:
        """Each rank's idle time in which the input of its next action was on a link.

        That is the part of the gap before an action that lies between the end of the compute that made its
        input and the input's arrival.
        """
        exposed = np.zeros(self.num_ranks)
        if not len(self.transfers):
            return [0.0] * self.num_ranks
        consumers = self.consumers()
        known = consumers >= 0
        consumer, source = consumers[known], self.transfers.source[known]
        arrival = self.transfers.arrival[known]
        before = self.previous_end()[consumer]
        idle_from = np.maximum(before, self.end[source])
        waited = np.minimum(self.start[consumer], arrival) - idle_from
        np.add.at(exposed, self.ranks[consumer], np.maximum(waited, 0.0))
        return [float(value) for value in exposed]

    def consumers(self) -> Ints:
        """For each transfer the action that it feeds (F of the next stage, B or I of the previous), or -1."""
        if self.transfers.target is not None:
            return self.transfers.target
        table = np.full((2, self.num_stages + 2, max(1, self.num_microbatches)), -1, np.int64)
        takes = _TAKES[self.kinds]
        own = np.flatnonzero(takes >= 0)
        table[takes[own], self.stages[own] + 1, self.microbatches[own]] = own
        source = self.transfers.source
        backward = (self.kinds[source] != int(Kind.F)).astype(np.int64)
        stage = self.stages[source] + 2 - 2 * backward
        found: Ints = table[backward, stage, self.microbatches[source]]
        return found

    def previous_end(self) -> Floats:
        """End of the action before each one on its lane; 0 for the first."""
        order = np.lexsort((self.start, self.lanes, self.ranks))
        previous = np.zeros(len(order))
        same = (self.ranks[order][1:] == self.ranks[order][:-1]) & (
            self.lanes[order][1:] == self.lanes[order][:-1]
        )
        previous[order[1:]] = np.where(same, self.end[order[:-1]], 0.0)
        return previous

    def bandwidth_demand(self) -> float:
        """Bandwidth that hides every transfer behind the compute that makes it, in boundaries' bytes per time.

        An action that sends does so at 1/(its span); lanes that run at once add up. The most demanding rank in
        the steady state counts (first backward to last forward of stage 0), or in the whole if there is none.
        Where F and B run at once (FBP) both count as sent, as on an inner accelerator: Table I has it so, and with
        two accelerators neither is an inner one.
        """
        source = self.transfers.source
        if len(source) and ((self.kinds == Kind.B) & (self.lanes > 0)).any():
            source = np.flatnonzero((self.kinds == Kind.F) | (self.kinds == Kind.B))
        first = (self.stages == 0) & np.isin(self.kinds, (Kind.B, Kind.I))
        last = (self.stages == 0) & (self.kinds == Kind.F)
        low, high = self.start[first].min(initial=np.inf), self.end[last].max(initial=-np.inf)
        steady = source[(self.start[source] >= low) & (self.end[source] <= high)]
        chosen = steady if len(steady) else source
        if not len(chosen):
            return 0.0
        # An action of no time, or of less than the clock tells apart, sends as fast as can be added up.
        shortest = max(_RESOLUTION * float(self.end.max()), _LEAST)
        rate = 1.0 / np.maximum(self.end[chosen] - self.start[chosen], shortest)
        times = np.concatenate([self.start[chosen], self.end[chosen]])
        ranks = np.concatenate([self.ranks[chosen]] * 2)
        return max(_running_peak(times, np.concatenate([rate, -rate]), ranks, self.num_ranks))

    def peak_in_flight(self) -> list[int]:
        """Most in-flight micro-batches at each stage, all replicas together (F start to B or W end)."""
        return [int(peak) for peak in self._peaks(np.ones(self.num_stages))]

    def peak_in_flight_by_rank(self) -> list[int]:
        """Most in-flight micro-batches on each rank, of all its stages."""
        each = [1.0] * self.num_stages
        return [int(peak) for peak in self.peak_bytes_by_rank(each, each, each)]

    def peak_activations(self) -> list[float]:
        """Most saved activations on each rank, in micro-batches of the rank's whole share of the model."""
        shares = np.zeros(self.num_ranks)
        pairs = {(int(rank), int(stage)) for rank, stage in zip(self.ranks, self.stages, strict=True)}
        for rank, _ in pairs:
            shares[rank] += 1
        size = [1.0] * self.num_stages
        return [float(peak) / max(1.0, shares[rank]) for rank, peak in enumerate(self.peak_bytes_by_rank(size))]

    def peak_bytes_by_rank(
        self, saved: list[float], kept: list[float] | None = None, delayed: list[float] | None = None
    ) -> list[float]:
        """Most bytes of saved activations on each rank, given those of each stage per micro-batch.

        A stage that recomputes holds only `kept` (its input) between F and R, and one that does its backward in
        two parts `delayed` between I and W, by default `saved`.
        """
        times, steps, _, ranks = self._steps(np.asarray(saved, float), kept, delayed)
        return _running_peak(times, steps, ranks, self.num_ranks)

    def bytes_over_time(
        self, saved: list[float], kept: list[float] | None = None, delayed: list[float] | None = None
    ) -> list[tuple[Floats, Floats]]:
        """Each rank's (times, bytes): saved activations from then on; `peak_bytes_by_rank` is their peak."""
        times, steps, _, ranks = self._steps(np.asarray(saved, float), kept, delayed)
        order = np.lexsort((steps, times, ranks))
        edges = np.searchsorted(ranks[order], np.arange(self.num_ranks + 1))
        own = [order[low:high] for low, high in pairwise(edges)]
        return [(times[part], np.cumsum(steps[part])) for part in own]

    def activation_changes(
        self,
        saved: Floats,
        kept: Sequence[float] | None = None,
        delayed: Sequence[float] | None = None,
    ) -> Floats:
        """By kind of action and stage, bytes of saved activations that F and R add when they start, and that
        others let go when they end; the arguments are those of `peak_bytes_by_rank`."""
        # Plain numbers, because numpy takes several times longer to compare with a member of an enum.
        forward, again, first, second, whole = (int(kind) for kind in (Kind.F, Kind.R, Kind.I, Kind.W, Kind.B))
        waiting = saved if delayed is None else np.asarray(delayed, float)
        recomputed = np.zeros(self.num_stages, bool)
        recomputed[self.stages[self.kinds == again]] = True
        held = np.where(recomputed, saved if kept is None else np.asarray(kept, float), saved)
        change = np.zeros((len(Kind), self.num_stages))
        change[forward], change[again], change[whole] = held, saved - held, -saved
        change[first], change[second] = waiting - saved, -waiting
        return change

    def compute_by_rank(self) -> list[Ints]:
        """Of each rank, indices of its actions that compute (F, B, I, W, R), in the order of time."""
        own = np.flatnonzero(_COMPUTES[self.kinds])
        if not _ordered(self.start[own], np.zeros(len(own)), self.ranks[own]):
            own = own[np.lexsort((self.start[own], self.ranks[own]))]
        edges = np.searchsorted(self.ranks[own], np.arange(self.num_ranks + 1)).tolist()
        return [own[low:high] for low, high in pairwise(edges)]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from bapipe.reporting.html.notebook import timeline_html

        return timeline_html(self)

    def _peaks(self, size: Floats) -> list[float]:
        times, steps, stages, _ = self._steps(size, list(size), list(size))
        return _running_peak(times, steps, stages, self.num_stages)

    def _steps(
        self, saved: Floats, kept: list[float] | None, delayed: list[float] | None
    ) -> tuple[Floats, Floats, Ints, Ints]:
        """Every growth and release of saved activations: times, byte steps, stages and ranks."""
        change = self.activation_changes(saved, kept, delayed)
        # In the order of lanes, which is nearly always that of time.
        own = np.flatnonzero(_COMPUTES[self.kinds])
        kinds, stages = self.kinds[own], self.stages[own]
        times = np.where(_GROWS[kinds], self.start[own], self.end[own])
        return times, change[kinds, stages], stages, self.ranks[own]


def _running_peak(times: Floats, steps: Floats, groups: Ints, count: int) -> list[float]:
    """Largest running sum of each group's steps in the order of time; at equal times releases come first."""
    if not _ordered(times, steps, groups):
        order = np.lexsort((steps, times, groups))
        groups, steps = groups[order], steps[order]
    edges = np.searchsorted(groups, np.arange(count + 1))
    sizes = np.diff(edges)
    if count and sizes[0] and (sizes == sizes[0]).all():
        own = steps[edges[0] : edges[-1]].reshape(count, sizes[0])
        return [max(0.0, peak) for peak in own.cumsum(axis=1).max(axis=1).tolist()]
    return [
        max(0.0, float(steps[low:high].cumsum().max())) if high > low else 0.0
        for low, high in pairwise(edges.tolist())
    ]


def _ordered(times: Floats, steps: Floats, groups: Ints) -> bool:
    """Whether they are sorted by group, then time, then step."""
    same = groups[1:] == groups[:-1]
    later, tied = times[1:] > times[:-1], times[1:] == times[:-1]
    in_group = later | (tied & (steps[1:] >= steps[:-1]))
    return bool(((groups[1:] > groups[:-1]) | (same & in_group)).all())
