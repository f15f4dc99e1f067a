"""Pass: plans that lack memory, made to fit by layers that recompute, where one is faster than all that fit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Candidate, stage_shape
from bapipe.planner.cut_search import CutSearch, family_of
from bapipe.planner.data_parallel import at_global_batch
from bapipe.planner.effort import effort_of
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.layer_choice import RunChoices
from bapipe.planner.layer_fit import fitted_by_layers, without_recomputation
from bapipe.planner.lightest_cuts import recomputing_cuts
from bapipe.planner.order_space import OrderSpace, order_spaces
from bapipe.planner.passes.search_cuts import may_search
from bapipe.planner.pipelines import FAMILIES, optimal
from bapipe.planner.placements import replica_counts
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.state import SearchState

__all__ = ["RECOMPUTING_LAYERS", "recompute_layers"]

Ints = NDArray[np.int64]

RECOMPUTING_LAYERS = "{}, recomputing layers"
"""the family in which such plans compete"""


_Cut = tuple[float, int, OrderSpace, PlannedOrder, tuple[int, ...]]
"""seconds of a step at least, by an estimate; micro-batch size, schedule, order, last units"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Start:
    """A plan without recomputation, and if its cuts and order may be changed, how."""

    candidate: Candidate
    space: OrderSpace | None = None
    order: PlannedOrder | None = None


def recompute_layers(state: SearchState) -> None:
    """Add the plans with layers that recompute that are faster than all that fit, or fit where none does.

    Candidates that lack memory are tried with the layers that repeat least forward time: the best of every family
    as it was cut, pipelines cut for what they then take, and those near the best of them.
    """
    if not state.request.chooses_layers or not may_search(state) or not _accelerators_alone(state):
        return
    search = _LayerSearch(state)
    near = [_Start(candidate=_plain(state, held)) for held in _recomputing(state)]
    for number, start in enumerate(near[: state.tuning.layer_starts]):
        search.try_start(start, always=number == 0)
    for start in _starts(state, search):
        search.try_start(start)
    for found, start in search.best_of_all():
        search.climb(found, start)
    for found, _ in search.found.values():
        if found.short is None or state.incumbents.best is None:
            family = RECOMPUTING_LAYERS.format(family_of(found.candidate))
            state.incumbents.add(family, found)


def _accelerators_alone(state: SearchState) -> bool:
    return all(unit.whole for size in state.tried_sizes[:1] for unit in state.chain(size).units)


class _LayerSearch:
    """What it may spend, and the best of every family so far."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        effort = effort_of(state.request.effort, state.tuning)
        share = state.tuning.layer_steps / max(state.tuning.search_steps, 1)
        self._steps, self._until = share * effort.steps, time.monotonic() + effort.seconds
        self._tried: set[tuple[object, ...]] = set()
        self._choices = RunChoices()
        self.cuts = CutSearch(state, effort)
        self.found: dict[str, tuple[Evaluation, _Start]] = {}
        """by family, the best and what it came from"""

    @property
    def spent(self) -> bool:
        return self._steps <= 0 or time.monotonic() > self._until

    @property
    def fastest(self) -> float:
        """Seconds per sample under which a plan is worth while."""
        known = [self._state.incumbents.best, *(own for own, _ in self.found.values())]
        rates = [own.throughput for own in known if own is not None and own.short is None]
        return (1 - self._state.tuning.search_gain) / max(rates) if rates else math.inf

    def try_start(self, start: _Start, *, below: float | None = None, always: bool = False) -> Evaluation | None:
        """The start made to fit, if that is faster than all others, or `below` so many seconds per sample; with
        `always` whatever is spent."""
        candidate = start.candidate
        schedule = candidate.schedule
        key = (
            candidate.chain.microbatch,
            candidate.stages,
            schedule.name,
            schedule.caps,
            schedule.dealing,
            candidate.copies,
            None if start.order is None else start.order.delays,
        )
        if key in self._tried or (self.spent and not always):
            return None
        self._tried.add(key)
        below = self.fastest if below is None else below
        hardware = self._state.hardware
        self._steps -= 2 * schedule.num_actions
        plain = evaluate(candidate, hardware)
        if plain.short is None or plain.time / plain.samples >= below:
            return None  # recomputing takes no less time
        work = self._choices.work
        found = fitted_by_layers(plain, hardware, below=below * plain.samples, choices=self._choices)
        self._steps -= self._state.tuning.choice_steps * (self._choices.work - work)
        if found is not plain:
            self._steps -= 4 * schedule.num_actions
        if found.short is not None:
            if not math.isinf(self.fastest):
                return None
        elif found.time / found.samples >= below:
            return None
        family = family_of(found.candidate)
        held = self.found.get(family)
        if held is None or _rank(found) < _rank(held[0]):
            self.found[family] = (found, start)
        return found if found.short is None else None

    def best_of_all(self) -> list[tuple[Evaluation, _Start]]:
        ranked = sorted(self.found.values(), key=lambda own: _rank(own[0]))
        movable = [own for own in ranked if own[1].space is not None and own[0].short is None]
        return movable[: self._state.tuning.layer_starts]

    def climb(self, found: Evaluation, start: _Start) -> None:
        """Go on to plans with a cut moved by one, or other in-flight counts, as long as one is faster."""
        current, space, order = found, start.space, start.order
        assert space is not None
        assert order is not None
        while not self.spent:
            below = (1 - self._state.tuning.search_gain) / current.throughput
            for trial in self._near(current, space, order):
                better = self.try_start(trial, below=below)
                if better is not None:
                    current, order = better, trial.order or order
                    break
            else:
                return

    def _near(self, current: Evaluation, space: OrderSpace, order: PlannedOrder) -> Iterator[_Start]:
        stages, chain = current.candidate.stages, self._state.chain(current.candidate.chain.microbatch)
        cuts = [stage.last for stage in stages]
        taken = tuple(index for stage in stages for index in stage.accelerators)
        seconds = current.stage_seconds
        busy = np.argsort(-(seconds.forward + seconds.backward)).tolist()
        # The busiest stage first: it gives a layer to the one before or after it.
        moves = [move for stage in busy for move in ((stage, -1), (stage - 1, 1))]
        for cut, by in dict.fromkeys([*moves, *((cut, -by) for cut, by in moves)]):
            if 0 <= cut < len(cuts) - 1:
                moved = (*cuts[:cut], cuts[cut] + by, *cuts[cut + 1 :])
                if all(before < after for before, after in itertools.pairwise((-1, *moved))):
                    yield self.start(chain, space, order, moved, taken)
        for other in space.near(order, order.counts, order.microbatches):
            yield self.start(chain, space, other, tuple(cuts), taken)

    def start(
        self, chain: Chain, space: OrderSpace, order: PlannedOrder, cuts: tuple[int, ...], taken: tuple[int, ...]
    ) -> _Start:
        cases = self.cuts.cases(chain, order.counts, np.array([cuts]), np.array([taken]))
        cap = "" if space.cap is None else f" with K = {space.cap}"
        candidate = cases.candidate(0, order, f"{space.name}{cap}, {stage_shape(order.counts)}")
        return _Start(candidate=candidate, space=space, order=order)


def _rank(evaluation: Evaluation) -> tuple[float, float]:
    return (0.0 if evaluation.short is None else evaluation.short[1], -evaluation.throughput)


def _recomputing(state: SearchState) -> Iterator[Evaluation]:
    """Plans of which stages recompute, and those that lack memory; those that may be fastest first."""
    for held in state.incumbents.ranked():
        again = any(stage.recompute for stage in held.candidate.stages)
        if (again or held.short is not None) and held.candidate.schedule.flushes:
            yield held


def _plain(state: SearchState, held: Evaluation) -> Candidate:
    """The plan with nothing that recomputes; copies of a part's plan may have layers that do."""
    chain = held.candidate.chain
    return without_recomputation(held.candidate, state.chain(chain.microbatch) if chain.recompute else chain)


def _starts(state: SearchState, search: _LayerSearch) -> Iterator[_Start]:
    """Plans that may lack memory, those that may be fastest first."""
    for held in _recomputing(state):
        yield _Start(candidate=_plain(state, held))
    yield from _data_parallel(state, search)
    cut = [own for size in state.tried_sizes for own in _cut_for_layers(state, search, size)]
    for soonest, size, space, order, cuts in sorted(cut, key=lambda own: own[0]):
        if search.spent:
            return
        if math.isinf(search.fastest) or soonest / state.global_batch < search.fastest:
            yield search.start(state.chain(size), space, order, cuts, tuple(range(sum(order.counts))))


def _data_parallel(state: SearchState, search: _LayerSearch) -> Iterator[_Start]:
    request = state.request
    if request.schedule not in (None, "data-parallel") or request.stages not in (None, 1):
        return
    for size in state.tried_sizes:
        chain = state.chain(size)
        whole = at_global_batch(chain, state.hardware, state.global_batch)
        if whole is not None and state.perfect_time(chain) / state.global_batch < search.fastest:
            yield _Start(candidate=whole)


def _unlimited(state: SearchState, chain: Chain, space: OrderSpace, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The last units of the fastest stages if memory did not matter."""
    stages = optimal(
        chain,
        state.hardware,
        FAMILIES[space.name],
        state.global_batch // chain.microbatch,
        num_stages=len(counts),
        unlimited=True,
        tuning=state.tuning,
    )
    return tuple(stage.last for stage in stages)


def _shapes(state: SearchState, chain: Chain) -> list[tuple[int, ...]]:
    """Replicas of each stage: pipelines over all accelerators, and equal copies of shorter ones. On few
    accelerators pipelines that leave some idle too, and of few layers all ways to replicate stages.
    """
    count, stages, tuning = len(state.cluster), state.request.stages, state.tuning
    if stages is not None:
        return [(1,) * stages]
    most = min(count, len(chain))
    alone = [(1,) * depth for depth in range(most, 1, -1)]
    if count <= tuning.fewer_ranks:
        every = list(replica_counts(count, stages=None, most_stages=most, replicas=True))
        if len(every) * len(chain) <= tuning.recompute_shapes:
            return [counts for counts in every if len(counts) > 1] or [(1,)]
    alike = [
        (max(1, count // depth),) * depth for depth in range(most, 1, -1) if count % depth == 0 or depth == most
    ]
    return list(dict.fromkeys(alike + (alone if count <= tuning.fewer_ranks else []))) or [(1,)]


def _cut_for_layers(state: SearchState, search: _LayerSearch, size: int) -> Iterator[_Cut]:
    """Pipelines of every shape and usual order, cut for what they take with layers that recompute, and as if
    memory did not matter: few layers that recompute may make these fit."""
    chain, microbatches = state.chain(size), state.global_batch // size
    if state.perfect_time(chain) / state.global_batch >= search.fastest:
        return
    tables, left = search.cuts.tables(chain), state.tuning.layer_tables
    for space, counts in itertools.product(order_spaces(state.request), _shapes(state, chain)):
        if not space.allows(counts) or max(counts) > microbatches:
            continue
        orders = list(space.usual(counts, microbatches))
        if space.chooses:
            orders += space.of(counts, microbatches, counts)
        firsts = tuple(int(edge) for edge in np.cumsum([0, *counts[:-1]]))
        alone = max(counts) == 1 and space.name in FAMILIES
        others = [_unlimited(state, chain, space, counts)] if alone else []
        for order in dict.fromkeys(orders):
            left -= len(counts) * len(chain) ** 2
            if left < 0:
                return
            for longest, cuts in recomputing_cuts(tables, state.hardware, firsts, order, others):
                bound = search.cuts.cases(chain, counts, *_one_case(counts, cuts)).bound(order)
                yield max(longest * state.tuning.layer_estimate, float(bound[0])), size, space, order, cuts


def _one_case(counts: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[Ints, Ints]:
    """These cuts on the accelerators in their order."""
    return np.array([cuts]), np.arange(sum(counts))[None, :]
