"""Search by simulation: cuts, orders of accelerators, replicas and in-flight counts, as far as the effort goes.

The exact partition goes by a formula; what the simulator says of its answer may be beaten by a neighbour that the
formula holds for slower, and its memory is that of sums over units. Here plans are timed by the simulator itself,
many at once, in an order that goes by the request alone, and those that a bound rules out are passed over.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Candidate, stage_shape, unreplicated
from bapipe.planner.dealt_cases import dealt_orders
from bapipe.planner.effort import Effort
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.lightest_cuts import fitting_and_lightest_cuts
from bapipe.planner.order_space import DATA_PARALLEL, OrderSpace, order_spaces
from bapipe.planner.placements import accelerator_orders, replica_counts
from bapipe.planner.plan_cases import PlanCases
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_dealing import dealt_words
from bapipe.planner.stage_tables import StageTables
from bapipe.planner.state import SearchState
from bapipe.units import format_seconds

__all__ = ["CutSearch", "Shape", "family_of"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """All cases of some replica counts at one micro-batch size, under one schedule."""

    space: OrderSpace
    cases: PlanCases
    soonest: float
    """seconds per sample that none of them beats"""


class CutSearch:
    """One search: what it may spend, what it has found and what it could not rule out."""

    def __init__(self, state: SearchState, effort: Effort) -> None:
        self._state, self._effort, self._steps = state, effort, effort.steps
        self._begin = time.monotonic()
        self._tables: dict[int, StageTables] = {}
        self.open = math.inf
        """seconds per sample that what was passed over for lack of effort may take at least"""
        self.ruled_out = ""
        """why the last order was not simulated in any case: all too slow, or too full"""
        self.misses = 0
        """plans that may have been faster and did not fit"""
        fitting = [own for own in state.incumbents.by_family.values() if own.short is None]
        self.best = max(fitting, key=lambda own: own.throughput, default=None)

    @property
    def spent(self) -> bool:
        """Whether nothing more may be simulated."""
        return self._steps <= 0 or time.monotonic() - self._begin > self._effort.seconds

    @property
    def pace(self) -> float:
        """Seconds per sample under which a plan is worth while: the gain must be one that counts."""
        worth = 1 - self._state.tuning.search_gain
        return math.inf if self.best is None else worth / self.best.throughput

    def tables(self, chain: Chain) -> StageTables:
        """The chain's costs by run of units, made once."""
        return self._tables.setdefault(chain.microbatch, StageTables(chain))

    def shapes(self, sizes: Sequence[int]) -> list[Shape]:
        """The shapes whose cases are few enough to try them all, those that may be fastest first."""
        state, found = self._state, []
        for size in sizes:
            chain = state.chain(size)
            left = self._effort.more * state.tuning.search_cases
            for space, counts in self._counts(chain, state.global_batch // size):
                cases = self._every_case(
                    chain, counts, most=min(left, self._effort.more * state.tuning.shape_cases)
                )
                if cases is None:
                    self.open = 0.0
                    continue
                left -= len(cases)
                order = next(space.usual(counts, cases.microbatches))
                soonest = float(cases.bound(order).min()) / state.global_batch
                found.append(Shape(space=space, cases=cases, soonest=soonest))
        return sorted(found, key=lambda shape: shape.soonest)

    def retimed(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Shapes that another search has listed, by this one's times."""
        found = []
        for shape in shapes:
            old = shape.cases
            cases = self.cases(self._state.chain(old.chain.microbatch), old.counts, old.cuts, old.orders)
            order = next(shape.space.usual(cases.counts, cases.microbatches))
            soonest = float(cases.bound(order).min()) / self._state.global_batch
            found.append(Shape(space=shape.space, cases=cases, soonest=soonest))
        return sorted(found, key=lambda shape: shape.soonest)

    def _counts(self, chain: Chain, microbatches: int) -> Iterator[tuple[OrderSpace, tuple[int, ...]]]:
        """Replica counts under each schedule that the request allows."""
        state, request = self._state, self._state.request
        count, spaces = len(state.cluster), order_spaces(state.request)
        chained = state.cluster.topology == "chain"
        wide = count <= state.tuning.replica_search_accelerators and not chained
        for space in spaces:
            shapes = replica_counts(
                count, stages=request.stages, most_stages=len(chain), replicas=space.replicas and wide
            )
            for counts in shapes:
                if counts == (counts[0],) and counts[0] > 1:
                    if request.schedule is None and (
                        microbatches % counts[0] == 0 or self._unequal(microbatches, counts[0])
                    ):
                        yield DATA_PARALLEL, counts
                elif max(counts) <= microbatches and space.allows(counts):
                    yield space, counts
            if space.replicas and not wide and count > 1:
                self.open = 0.0

    def _unequal(self, microbatches: int, replicas: int) -> bool:
        """Whether replicas of data parallelism may take unequal numbers of micro-batches."""
        mixed = len({item.type for item in self._state.cluster.accelerators}) > 1
        return mixed and self._state.request.dealing == "speed" and microbatches >= replicas

    def _every_case(self, chain: Chain, counts: tuple[int, ...], *, most: int) -> PlanCases | None:
        """All cuts on all orders of accelerators; None where they are too many."""
        last, depth = len(chain) - 1, len(counts)
        ways = math.comb(last, depth - 1)
        if ways > most:
            return None
        orders = accelerator_orders(self._state.cluster, sum(counts), most=most // ways)
        if orders is None or ways * len(orders) > most:
            return None
        cuts = np.array([(*ends, last) for ends in itertools.combinations(range(last), depth - 1)], np.int64)
        taken = np.array(orders, np.int64)
        return self.cases(chain, counts, np.repeat(cuts, len(taken), axis=0), np.tile(taken, (len(cuts), 1)))

    def cases(self, chain: Chain, counts: tuple[int, ...], cuts: Ints, orders: Ints) -> PlanCases:
        """These cuts on these accelerators."""
        return PlanCases(
            tables=self.tables(chain),
            hardware=self._state.hardware,
            microbatches=self._state.global_batch // chain.microbatch,
            counts=counts,
            cuts=cuts,
            orders=orders,
        )

    def try_order(
        self, space: OrderSpace, cases: PlanCases, order: PlannedOrder, *, below: float | None = None
    ) -> Evaluation | None:
        """Time every case that may be the best under this order; return the new best, if there is one.

        With `below`, seconds per sample, the fastest that is under them, be it the best of all or not. Where
        replicas of a stage are of several types, also with micro-batches dealt by their speed.
        """
        found = self._try_dealt(space, cases, order, below=below)
        if not any(cases.unlike) or self._state.request.dealing == "equal":
            return found
        why = self.ruled_out
        for dealt, chosen in self._dealings(cases, order, below=below):
            pace = below if found is None else 1 / found.throughput
            found = self._try_dealt(space, cases.of(chosen), dealt, below=pace) or found
            why = why if self.ruled_out == why else ""
        self.ruled_out = why
        return found

    def _dealings(
        self, cases: PlanCases, order: PlannedOrder, *, below: float | None
    ) -> list[tuple[PlannedOrder, Ints]]:
        """The order with the dealings of the cases that may be fastest."""
        tuning, samples = self._state.tuning, self._state.global_batch
        self._steps -= len(order.counts) * (tuning.bound_steps + len(cases) / tuning.cases_as_one)
        least = cases.bound(order, best_dealt=True)
        chosen = np.flatnonzero(least < (self.pace if below is None else below) * samples)
        chosen = chosen[np.argsort(least[chosen], kind="stable")]
        if not len(chosen) or self.spent:
            return []
        made = dealt_orders(cases, order, chosen[: tuning.dealt_cases])
        left = chosen[tuning.dealt_cases :].tolist() + [own[0] for _, own in made[tuning.dealings :]]
        self.open = min([self.open, *(float(least[case]) / samples for case in left)])
        return made[: tuning.dealings]

    def _try_dealt(
        self, space: OrderSpace, cases: PlanCases, order: PlannedOrder, *, below: float | None
    ) -> Evaluation | None:
        """As `try_order`, of micro-batches that are dealt as the order says."""
        state, tuning = self._state, self._state.tuning
        pace = self.pace if below is None else below
        samples = state.global_batch
        overhead = max(cases.chain.profile.table(name).step_overhead or 0.0 for name in cases.chain.types)
        self._steps -= len(order.counts) * (tuning.bound_steps + len(cases) / tuning.cases_as_one)
        least = cases.bound(order) + overhead
        soon = least < pace * samples
        if not soon.any():
            self.ruled_out = "slow"
            return None
        fit = cases.may_fit(order)
        self.ruled_out = "" if fit.any() else "full"
        self.misses += int((soon & ~fit).sum())
        chosen = np.flatnonzero(soon & fit)
        if not len(chosen):
            return None
        if self.spent:
            self.open = min(self.open, float(least[chosen].min()) / samples)
            return None
        if len(chosen) > tuning.cases_together:
            chosen = chosen[np.argsort(least[chosen], kind="stable")]
            self.open = min(self.open, float(least[chosen[tuning.cases_together]]) / samples)
            chosen = chosen[: tuning.cases_together]
        times = cases.times(order, chosen)
        alone = times is None
        if times is None:
            times = least[chosen]
        else:
            self._steps -= order.actions * (1 + len(chosen) / tuning.cases_as_one)
            times = times + overhead
        return self._first_fitting(space, cases, order, chosen, times, pace, alone=alone)

    def _first_fitting(
        self,
        space: OrderSpace,
        cases: PlanCases,
        order: PlannedOrder,
        chosen: Ints,
        times: NDArray[np.float64],
        pace: float,
        *,
        alone: bool,
    ) -> Evaluation | None:
        """From the fastest on, the first that fits; where times are only bounds, the fastest of those that fit."""
        state, found = self._state, None
        ranked = np.argsort(times, kind="stable")
        for tried, place in enumerate(ranked):
            if times[place] >= (pace if found is None else self.pace) * state.global_batch:
                break
            if tried >= state.tuning.cases_weighed or self.spent:
                self.open = min(self.open, float(times[place]) / state.global_batch)
                break
            self._steps -= 2 * order.actions
            candidate = cases.candidate(int(chosen[place]), order, _label(space, order))
            evaluation = evaluate(candidate, state.hardware)
            if evaluation.short is not None:
                self.misses += 1
                self.take(evaluation)
                continue
            if found is None or evaluation.throughput > found.throughput:
                found = evaluation if evaluation.throughput > 1 / pace else found
            self.take(evaluation)
            if not alone:
                break
        return found

    def fit(self, chain: Chain) -> None:
        """Add pipelines whose cuts go by what every stage really holds.

        The best balanced and the lightest of every depth, with the usual in-flight counts and with the least, and
        where the schedule may, with recomputation. Whatever effort is left, but where something fits only as far
        as it goes, and what may be faster.
        """
        state = self._state
        microbatches, tables = state.global_batch // chain.microbatch, self.tables(chain)
        most = min(len(state.cluster), len(chain))
        thorough = state.thorough(len(chain))
        depths = [state.request.stages] if state.request.stages is not None else range(most, 0, -1)
        spaces = order_spaces(state.request)
        for space, depth in itertools.product(
            spaces if thorough else spaces[:1], depths if thorough else depths[:1]
        ):
            if self.best is not None and (self.spent or state.perfect_time(chain, depth) >= self.best.time):
                continue
            counts = (1,) * depth
            orders = list(space.usual(counts, microbatches))[0 if thorough else -1 :]
            if space.chooses:
                orders += space.of(counts, microbatches, counts)
            if space.recompute or (space.name == "gpipe" and state.request.whole_stages):
                orders += [replace(order, recompute=tuple(range(depth))) for order in orders]
            placed = accelerator_orders(state.cluster, depth, most=state.tuning.type_orders)
            # What fits goes by types alone.
            kinds = {
                tuple(state.cluster.accelerators[index].type for index in taken): taken
                for taken in reversed(placed or [tuple(range(depth))])
            }
            for order, taken in itertools.product(orders, reversed(kinds.values())):
                cut = fitting_and_lightest_cuts(tables, state.hardware, taken, order)
                for cuts in dict.fromkeys(own for own in cut if own is not None):
                    if any(last <= first for first, last in itertools.pairwise((-1, *cuts))):
                        continue
                    cases = self.cases(chain, counts, np.array([cuts]), np.array([taken]))
                    if self.best is None or cases.bound(order)[0] < self.pace * state.global_batch:
                        self.offer(cases.candidate(0, order, _label(space, order)))

    def offer(self, candidate: Candidate) -> None:
        """Simulate a candidate unless it was already, and keep it if it is the best of all."""
        if self._state.incumbents.is_new(candidate):
            self._steps -= 2 * candidate.schedule.num_actions
            self.take(evaluate(candidate, self._state.hardware))

    def take(self, evaluation: Evaluation) -> None:
        """Keep what fits and is the best so far; where nothing fits yet, also what does not."""
        fits = evaluation.short is None
        if fits and (self.best is None or evaluation.throughput > self.best.throughput):
            self.best = evaluation
        elif fits or self.best is not None:
            return
        self._state.incumbents.add(family_of(evaluation.candidate), evaluation)

    def report(self, soonest: float) -> None:
        """Tell whoever listens the best time and what the rest may gain, given what it takes at least."""
        progress = self._state.progress
        if progress is None or self.best is None:
            return
        gain = max(0.0, 1 - min(self.open, soonest) * self.best.throughput)
        share = max(
            1 - self._steps / self._effort.steps if math.isfinite(self._effort.steps) else 0.0,
            (time.monotonic() - self._begin) / self._effort.seconds,
        )
        progress(f"{format_seconds(self.best.time)} per global batch, at most {gain:.1%} to gain", min(1.0, share))

    def sweep(self, shapes: list[Shape]) -> None:
        """Try the usual orders of every shape, then all orders, then those with recomputation.

        These have an allowance of their own: more memory, with which more plans without it are to be tried, must
        not leave them out.
        """
        tuning = self._state.tuning
        for shape in shapes:
            for order in shape.space.usual(shape.cases.counts, shape.cases.microbatches):
                self.try_order(shape.space, shape.cases, order)
        for again in (False, True):
            if again and self.misses:
                self._steps = max(self._steps, tuning.recompute_share * self._effort.steps)
            for shape in shapes:
                if shape.soonest >= self.pace or (again and not (shape.space.recompute and self.misses)):
                    continue
                if self._too_many(shape):
                    self.open = min(self.open, shape.soonest)
                    continue
                self.report(shape.soonest)
                if not all(
                    self._every_order(shape, own)
                    for own in (_subsets(len(shape.cases.counts)) if again else ((),))
                ):
                    self.open = min(self.open, shape.soonest)
                    break

    def too_many(self, shapes: Sequence[Shape]) -> bool:
        """Whether a shape that may be faster than the best has more orders than `sweep` tries."""
        return any(self._too_many(shape) for shape in shapes if shape.soonest < self.pace)

    def _too_many(self, shape: Shape) -> bool:
        orders = shape.space.size(shape.cases.counts, shape.cases.microbatches)
        return orders > self._effort.more * self._state.tuning.search_orders

    def _every_order(self, shape: Shape, recompute: tuple[int, ...]) -> bool:
        """Try all orders of a shape; False where the effort does not reach to the last.

        Fewer in flight take no less time at least, and more hold no less, so that most need not be looked at.
        """
        slow, full = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for order in shape.space.every(shape.cases.counts, shape.cases.microbatches):
            if any(_no_more(order.caps, known) for known in slow):
                continue
            if any(_no_more(known, order.caps) for known in full):
                continue
            if self.spent:
                return False
            self.try_order(shape.space, shape.cases, replace(order, recompute=recompute))
            if self.ruled_out:
                (slow if self.ruled_out == "slow" else full).append(order.caps)
        return True


def _no_more(caps: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether no stage has more in flight than under the others."""
    return all(own <= other for own, other in zip(caps, others, strict=True))


def _subsets(stages: int) -> list[tuple[int, ...]]:
    """Every choice of stages, but none."""
    return [chosen for count in range(1, stages + 1) for chosen in itertools.combinations(range(stages), count)]


def family_of(candidate: Candidate) -> str:
    """The family in which the candidate competes."""
    name, dealt = candidate.schedule.name, candidate.schedule.dealing is not None
    if name == "data-parallel":
        return "data-parallel, dealt by speed" if dealt else name
    return name if unreplicated(candidate.stages) else f"{name}, hybrid"


def _label(space: OrderSpace, order: PlannedOrder) -> str:
    counts = order.counts
    if order.dealing is not None:
        plain = (
            "data parallelism" if space.name == "data-parallel" else _label(space, replace(order, dealing=None))
        )
        return f"{plain}, micro-batches {dealt_words(order.schedule)}"
    if space.name == "data-parallel":
        steps = order.microbatches // counts[0]
        return "data parallelism" + (f", {steps} accumulation steps" if steps > 1 else "")
    cap = "" if space.cap is None else f" with K = {space.cap}"
    again = f", {len(order.recompute)} recomputing" if order.recompute else ""
    return f"{space.name}{cap}, {stage_shape(counts)}{again}"
