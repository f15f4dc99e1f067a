"""Which layers of a rank recompute: those that repeat least forward time among the choices that fit.

A rank holds one or several stages (spans of units), each with K micro-batches in flight. With K · kept bytes of
all its units, the fullest point of a backward is at some unit u: those after it in its stage have let go of
theirs, and it needs workspace, or of a run that recomputes all that the run has saved again:

    bytes = sum of K · kept + max over u (needed(u) - what the units after u in its stage keep)

`choose_runs` goes from the last unit to the first and keeps every choice that no other beats in time, in bytes and
in what a unit before may still add. That is exact; where choices grow too many they are thinned out, which never
understates what a choice holds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.recomputed_layers import may_recompute, run_inputs
from bapipe.costs.segments import Chain, Floats, Run

__all__ = [
    "ChosenRuns",
    "RunChoices",
    "Span",
    "UnitNeeds",
    "choose_runs",
    "held_bytes",
    "least_repeated",
    "unit_needs",
]

Ints = NDArray[np.int64]
_MOST_CHOICES = 600
"""choices that are kept after each unit; more are thinned out"""
_ALL_CHOICES = 12
"""units of a rank up to which so many are kept; of more units fewer, at least a tenth"""
_ALL_RUNS = 12
"""units of a span up to which runs of any length are tried"""
_LONGEST_RUN = 4
"""units of a run in longer spans"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage of a rank."""

    first: int
    last: int
    inflight: float
    """micro-batches that it holds at once, 1 or more"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitNeeds:
    """What each unit of a chain takes and holds, per micro-batch."""

    forward: Floats
    """seconds that repeating it costs"""
    saved: Floats
    """bytes that it keeps where it does not recompute"""
    inputs: Floats
    """bytes that a run which begins with it keeps"""
    shared: Floats
    """of these, bytes that it would save anyway"""
    workspace: Floats
    """bytes that it needs while it works"""
    allowed: NDArray[np.bool_]
    """whether it may recompute"""

    def of_run(self, first: int, last: int) -> float:
        """Most bytes that a run needs while it is repeated and goes backward, beyond its input."""
        held = np.cumsum(self.saved[first : last + 1]) - self.shared[first]
        return float((held + self.workspace[first : last + 1]).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRuns:
    """The runs of units that recompute, from the first on, and what comes of them."""

    runs: tuple[Run, ...]
    seconds: float
    """per micro-batch, repeated"""
    held: float
    """bytes, by the formula above"""


def unit_needs(chain: Chain, row: int) -> UnitNeeds:
    """Of a chain of which none recomputes, on the accelerator type of this row."""
    inputs = run_inputs(chain)
    known = np.where(np.isfinite(chain.kept_input), chain.kept_input, 0.0)
    return UnitNeeds(
        forward=chain.forward[row],
        saved=chain.saved_activations,
        inputs=inputs,
        shared=np.minimum(np.minimum(inputs, known), chain.saved_activations),
        workspace=np.maximum(chain.forward_workspace, chain.backward_workspace),
        allowed=may_recompute(chain),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Choices for the units so far, one entry each."""

    seconds: Floats
    held: Floats
    """bytes, as if no unit were left"""
    settled: Floats
    """bytes that are kept, without those of the units so far of this span and of the micro-batch that goes
    backward"""
    kept: Floats
    """bytes that are kept of all micro-batches"""
    link: Ints
    """its newest run among all links; -1: none recomputes"""
    last: Ints
    """last unit of the run that was just added; -1: the unit is kept"""

    def taking(self, chosen: Ints) -> _Choices:
        return _Choices(*(getattr(self, name)[chosen] for name in self.__slots__))


def choose_runs(
    needs: UnitNeeds, spans: Sequence[Span], room: float, *, least_bytes: bool = False
) -> ChosenRuns | None:
    """The choice of least repeated forward time that holds at most `room` bytes; None where none does.

    With `least_bytes` the one that holds least, whatever the room. Of choices that take as long the one that holds
    least. Cost: O(units · choices · longest run), choices at most some hundreds.
    """
    links: list[tuple[int, Run]] = []
    units = sum(span.last - span.first + 1 for span in spans)
    most = max(_MOST_CHOICES // 10, min(_MOST_CHOICES, _MOST_CHOICES * _ALL_CHOICES // units))
    limit = np.inf if least_bytes else room
    none = np.full(1, -1, np.int64)
    current = _Choices(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1), none, none)
    for span in spans:
        current = replace(current, settled=current.kept)
        known = {span.last + 1: current}
        for unit in range(span.last, span.first - 1, -1):
            choices = _joined([*_extended(needs, span, unit, known)])
            current = _fewer(choices, limit, most, several=len(spans) > 1, timed=not least_bytes)
            current = known[unit] = _linked(current, unit, links)
    if not len(current.seconds):
        return None
    order = np.lexsort((current.seconds, current.held) if least_bytes else (current.held, current.seconds))
    best = int(order[0])
    return ChosenRuns(
        runs=_runs(links, int(current.link[best])),
        seconds=float(current.seconds[best]),
        held=float(current.held[best]),
    )


class RunChoices:
    """Choices made in one search, kept for ranks that stay as they are while others change."""

    def __init__(self) -> None:
        self.work = 0
        """units squared, times spans, of the choices that were not known yet: about what they cost"""
        self._needs: dict[tuple[int, int], tuple[Chain, UnitNeeds]] = {}
        self._known: dict[tuple[object, ...], ChosenRuns | None] = {}

    def needs(self, chain: Chain, row: int) -> UnitNeeds:
        """As `unit_needs`."""
        key = id(chain), row
        if key not in self._needs:
            self._needs[key] = chain, unit_needs(chain, row)  # the chain is kept, so that its id stays its own
        return self._needs[key][1]

    def choose(
        self, needs: UnitNeeds, spans: tuple[Span, ...], room: float, *, least_bytes: bool = False
    ) -> ChosenRuns | None:
        """As `choose_runs`, for needs that were asked for here."""
        key = id(needs), spans, room, least_bytes
        if key not in self._known:
            self.work += len(spans) * sum(own.last - own.first + 1 for own in spans) ** 2
            self._known[key] = choose_runs(needs, spans, room, least_bytes=least_bytes)
        return self._known[key]


def least_repeated(needs: UnitNeeds, spans: Sequence[Span], room: float) -> float:
    """Seconds per micro-batch that any choice which holds at most `room` bytes repeats at least; infinite where
    none does: as if parts of units could recompute, and kept nothing. Linear in units, but for sorting them.
    """
    saved = np.concatenate([own.inflight * needs.saved[own.first : own.last + 1] for own in spans])
    seconds = np.concatenate([needs.forward[own.first : own.last + 1] for own in spans])
    free = np.concatenate([needs.allowed[own.first : own.last + 1] for own in spans]) & (saved > 0)
    lacking = float(saved.sum()) - room
    if lacking <= 0:
        return 0.0
    saved, seconds = saved[free], seconds[free]
    order = np.argsort(seconds / saved)
    spared, repeated = np.cumsum(saved[order]), np.cumsum(seconds[order])
    if not len(spared) or spared[-1] < lacking:
        return np.inf
    return float(np.interp(lacking, np.append(0.0, spared), np.append(0.0, repeated)))


def _extended(needs: UnitNeeds, span: Span, unit: int, known: dict[int, _Choices]) -> Iterator[_Choices]:
    """All choices from this unit on: it is kept, or begins a run of some length."""
    yield _with(known[unit + 1], span, float(needs.saved[unit]), float(needs.workspace[unit]), 0.0, -1)
    count = span.last - span.first + 1
    longest = count if count <= _ALL_RUNS else _LONGEST_RUN
    seconds = 0.0
    for last in range(unit, min(span.last, unit + longest - 1) + 1):
        if not needs.allowed[last]:
            break
        seconds += float(needs.forward[last])
        needed = needs.of_run(unit, last)
        yield _with(known[last + 1], span, float(needs.inputs[unit]), needed, seconds, last)


def _with(own: _Choices, span: Span, kept: float, needed: float, seconds: float, last: int) -> _Choices:
    """The choices with units before them that keep and need so much."""
    all_kept = span.inflight * kept
    return _Choices(
        own.seconds + seconds,
        np.maximum(own.held, own.settled + needed) + all_kept,
        own.settled + all_kept - kept,
        own.kept + all_kept,
        own.link,
        np.full(len(own.link), last, np.int64),
    )


def _joined(made: Sequence[_Choices]) -> _Choices:
    return _Choices(*(np.concatenate([getattr(own, name) for own in made]) for name in _Choices.__slots__))


def _fewer(own: _Choices, limit: float, most: int, *, several: bool, timed: bool) -> _Choices:
    """Those that may fit and that no other beats; where these are too many, the best of every size.

    What is kept matters for itself only where another span follows, of `several`; seconds only where `timed`.
    """
    own = own.taking(np.flatnonzero(own.held <= limit))
    by_bytes = (own.seconds, own.kept, own.settled, own.held)
    own = own.taking(np.lexsort((own.settled, own.held, own.seconds) if timed else by_bytes))
    own = own.taking(np.array(_unbeaten(own) if several else _on_stairs(own), np.int64))
    if len(own.seconds) <= most:
        return own
    low, high = float(own.held.min()), float(own.held.max())
    sizes = np.floor((own.held - low) / max(high - low, 1e-300) * (most - 1))
    _, chosen = np.unique(sizes, return_index=True)  # sorted by seconds: the first of a size is its fastest
    return own.taking(np.union1d(chosen, [int(own.held.argmin())]))


def _on_stairs(own: _Choices) -> list[int]:
    """Of choices in the order of their seconds, those that none before both holds and settles less than."""
    rising: list[float] = []
    """held bytes of the choices found that no other found beats"""
    falling: list[float] = []
    """and what they have settled"""
    found = []
    for place, (held, settled) in enumerate(zip(own.held.tolist(), own.settled.tolist(), strict=True)):
        at = bisect.bisect_right(rising, held)
        if at and falling[at - 1] <= settled:
            continue
        end = at
        while end < len(falling) and falling[end] >= settled:
            end += 1
        start = at - 1 if at and rising[at - 1] == held else at
        rising[start:end] = [held]
        falling[start:end] = [settled]
        found.append(place)
    return found


def _unbeaten(own: _Choices) -> list[int]:
    """The same, by what is kept too."""
    figures = np.stack([own.held, own.settled, own.kept], axis=1)
    places = np.arange(len(figures))
    found: list[int] = []
    while len(places):
        found.append(int(places[0]))
        left = (figures < figures[0]).any(axis=1)  # the first itself is not among them
        figures, places = figures[left], places[left]
    return found


def _linked(own: _Choices, unit: int, links: list[tuple[int, Run]]) -> _Choices:
    """With the runs that were just added among all links."""
    link = own.link.copy()
    for place in np.flatnonzero(own.last >= 0).tolist():
        links.append((int(link[place]), (unit, int(own.last[place]))))
        link[place] = len(links) - 1
    return replace(own, link=link, last=np.full(len(link), -1, np.int64))


def _runs(links: Sequence[tuple[int, Run]], link: int) -> tuple[Run, ...]:
    found = []
    while link >= 0:
        link, run = links[link]
        found.append(run)
    return tuple(sorted(found))


def held_bytes(needs: UnitNeeds, spans: Sequence[Span], runs: Sequence[Run]) -> float:
    """What a rank holds with these runs recomputing, by the formula above."""
    begins = dict(runs)
    kept = most = 0.0
    for span in spans:
        parts, unit = [], span.first
        while unit <= span.last:
            last = begins.get(unit)
            own = (needs.saved[unit], needs.workspace[unit])
            parts.append(own if last is None else (needs.inputs[unit], needs.of_run(unit, last)))
            unit = unit + 1 if last is None else last + 1
        tail = 0.0
        for own_kept, needed in reversed(parts):
            kept += span.inflight * float(own_kept)
            most = max(most, float(needed) - tail)
            tail += float(own_kept)
    return kept + most
