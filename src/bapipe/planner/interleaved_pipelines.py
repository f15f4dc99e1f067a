"""Interleaved pipelines: several stages per accelerator, as many on each or more on faster ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import stage_costs
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.inflight_caps import inflight_bytes
from bapipe.planner.local_moves import moved_cuts
from bapipe.planner.looped_cuts import Cuts, balanced_ranks, fastest_first, looped_bound
from bapipe.planner.order_times import order_room
from bapipe.planner.partition.exact.problem import Problem
from bapipe.planner.partition.exact.solve import solve
from bapipe.planner.partition.paper.stage_cuts import starts
from bapipe.planner.quickest_orders import quickest_orders
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.planner.varied_times import varied_times
from bapipe.schedule.actions import Schedule
from bapipe.schedule.interleaving import interleaved
from bapipe.schedule.looped_order import (
    LOOPED_CHOICES,
    LoopedChoice,
    LoopedStage,
    justified_order,
    looped_order,
    looped_placement,
)

__all__ = ["interleaved_candidate", "looped_pipelines"]


def interleaved_candidate(
    chain: Chain, hardware: Hardware, microbatches: int, *, ranks: int, virtual: int
) -> Candidate:
    """Interleaved 1F1B on alike accelerators: N·v balanced stages dealt round-robin; raises if that cannot be."""
    cluster = hardware.cluster
    if len(chain.types) > 1:
        raise BaPipeError("as many stages on every accelerator need alike ones")
    _require_links(cluster)
    if ranks * virtual > len(chain):
        raise InfeasibleError(f"{ranks * virtual} stages need as many layers, got {len(chain)}")
    link = cluster.within
    units = UnitSeconds.of(chain)
    problem = Problem.unlimited(
        forward=units.forward,
        backward=units.backward,
        counts=[ranks * virtual],
        microbatches=microbatches,
        send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
        send_backward=chain.return_seconds(link.bandwidth, link.latency)[:-1],
        num_stages=ranks * virtual,
    )
    stages = tuple(
        StageChoice(first=stage.first_layer, last=stage.last_layer, accelerators=(index % ranks,))
        for index, stage in enumerate(solve(problem).stages)
    )
    return Candidate(
        label=f"interleaved, {ranks} accelerators with {virtual} stages each",
        chain=chain,
        stages=stages,
        schedule=interleaved(ranks, microbatches, virtual=virtual),
    )


def _require_links(cluster: Cluster) -> None:
    if cluster.topology == "chain":
        raise BaPipeError("interleaving needs accelerators that are each connected to any other")


_Made = tuple[Schedule, float]
"""an order, and its seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looped:
    """Accelerators with so many stages each, and cuts that balance them."""

    accelerators: tuple[int, ...]
    """of each rank"""
    counts: tuple[int, ...]
    cuts: Cuts
    bound: float
    """seconds that no order of these stages beats"""

    def candidate(self, chain: Chain, cuts: Cuts, schedule: Schedule) -> Candidate:
        counts = self.counts
        same = len(set(counts)) == 1
        each = f"{counts[0]} stages each" if same else "-".join(map(str, counts)) + " stages"
        return Candidate(
            label=f"interleaved, {len(counts)} accelerators with {each}",
            chain=chain,
            stages=self.stages(cuts),
            schedule=schedule,
        )

    def stages(self, cuts: Cuts) -> tuple[StageChoice, ...]:
        return tuple(
            StageChoice(first=first, last=last, accelerators=(self.accelerators[rank],))
            for first, last, (rank,) in zip(starts(cuts), cuts, looped_placement(self.counts), strict=True)
        )


def looped_pipelines(
    chain: Chain,
    hardware: Hardware,
    microbatches: int,
    *,
    ranks: int,
    within: float = math.inf,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[Evaluation]:
    """Interleaving with unequal numbers of stages, and on accelerators of several types; raises if it cannot be.

    The fastest accelerators come first and have most stages. Of all such numbers up to three the few whose cuts
    are bound to take least, not much more than `within` seconds, get orders made for their times; and where one of
    these is not much longer either, their cuts move as long as an order gets shorter by that. Larger problems have
    none.
    """
    cluster = hardware.cluster
    _require_links(cluster)
    taken = fastest_first(chain, cluster, ranks)
    rows = tuple(chain.row(cluster.accelerators[index].type) for index in taken)
    shapes = []
    for counts in _numbers_of_stages(rows, len(chain)):
        if sum(counts) * microbatches > tuning.order_size:
            continue
        of_stage = tuple(rank for (rank,) in looped_placement(counts))
        cuts = balanced_ranks(chain, of_stage, rows, microbatches)
        bound = looped_bound(chain, of_stage, rows, cuts, microbatches)
        if bound < (1 + tuning.cuts_save) * within:
            shapes.append(_Looped(accelerators=taken, counts=counts, cuts=cuts, bound=bound))
    searches = [
        _OrderSearch(shape, chain, hardware, microbatches, tuning)
        for shape in sorted(shapes, key=lambda own: own.bound)[: tuning.looped_shapes]
    ]
    found = []
    for search in searches:
        if search.soonest <= (1 + tuning.cuts_save) * within:
            search.climb()
            found += search.simulated()
    return found


def _numbers_of_stages(rows: Sequence[int], layers: int) -> Iterator[tuple[int, ...]]:
    """Stages of each rank: one to three, never more than the rank before, and not one on all."""
    kinds = [sum(1 for _ in own) for _, own in itertools.groupby(rows)]
    shapes: list[tuple[int, ...]]
    if len(kinds) == 1:
        shapes = [
            (less + 1,) * first + (less,) * (len(rows) - first)
            for less, first in itertools.product((1, 2), range(len(rows), 0, -max(1, len(rows) // 4)))
        ]
    else:
        shapes = [
            tuple(number for number, count in zip(numbers, kinds, strict=True) for _ in range(count))
            for numbers in itertools.product((1, 2, 3), repeat=len(kinds))
            if list(numbers) == sorted(numbers, reverse=True) and numbers[0] > 1
        ]
    yield from (counts for counts in shapes if sum(counts) <= layers)


class _OrderSearch:
    """Orders of one shape, and cuts that give shorter ones."""

    def __init__(
        self, shape: _Looped, chain: Chain, hardware: Hardware, microbatches: int, tuning: Tuning
    ) -> None:
        self._shape, self._chain, self._hardware = shape, chain, hardware
        self._microbatches, self._tuning = microbatches, tuning
        self._known: dict[Cuts, tuple[list[LoopedStage], list[float]]] = {}
        first = {choice: self._listed(shape.cuts, choice)[1] for choice in LOOPED_CHOICES}
        self._choices = sorted(LOOPED_CHOICES, key=lambda choice: first[choice])[: tuning.varied_choices]
        soonest = {choice: self._justified(shape.cuts, choice, rounds=1)[1] for choice in self._choices}
        self._quickest = min(self._choices, key=lambda choice: soonest[choice])
        self._cuts = shape.cuts
        self.soonest = soonest[self._quickest]
        """seconds of the shortest order so far, as if links were never shared"""

    def _listed(self, cuts: Cuts, choice: LoopedChoice) -> _Made:
        times, room = self._times(cuts)
        return looped_order(times, self._microbatches, choice, room=room)

    def _justified(self, cuts: Cuts, choice: LoopedChoice, *, limit: float = math.inf, rounds: int = 4) -> _Made:
        times, room = self._times(cuts)
        return justified_order(times, self._microbatches, choice, limit=limit, room=room, rounds=rounds)

    def _times(self, cuts: Cuts) -> tuple[list[LoopedStage], list[float]]:
        if cuts not in self._known:
            self._known[cuts] = _times(self._shape, self._chain, cuts, self._hardware, self._tuning)
        return self._known[cuts]

    def climb(self) -> None:
        """Move the cuts as long as an order gets shorter by that."""
        actions, tried = 2 * sum(self._shape.counts) * self._microbatches, {self._cuts}
        most = max(self._tuning.looped_orders, self._tuning.looped_actions // actions)
        improved = True
        while improved and len(tried) < most:
            improved = False
            for moved in moved_cuts(self._cuts, most=most):
                if moved in tried or len(tried) >= most:
                    continue
                tried.add(moved)
                seconds = self._justified(moved, self._quickest, rounds=1)[1]
                if seconds < self.soonest * (1 - self._tuning.order_gain):
                    self.soonest, self._cuts, improved = seconds, moved, True
                    break

    def simulated(self) -> list[Evaluation]:
        """The fastest orders of the cuts, and those made for times near those of the stages."""
        cuts, tuning = self._cuts, self._tuning
        made = [self._listed(cuts, choice) for choice in LOOPED_CHOICES]
        made += [self._justified(cuts, choice) for choice in self._choices]
        made += [self._justified(cuts, self._quickest, limit=limit) for limit in tuning.justified_limits]
        orders = [schedule for schedule, _ in made]
        any_order = self._shape.candidate(self._chain, cuts, orders[0])
        found = quickest_orders(any_order, orders, self._hardware, most=tuning.orders_simulated)
        times, room = self._times(cuts)
        varied = [
            looped_order(own, self._microbatches, choice, room=room)[0]
            for own in varied_times(times, tuning.time_variations)
            for choice in self._choices
        ]
        return [*found, *quickest_orders(any_order, varied, self._hardware, most=tuning.orders_simulated)]


def _times(
    shape: _Looped, chain: Chain, cuts: Cuts, hardware: Hardware, tuning: Tuning
) -> tuple[list[LoopedStage], list[float]]:
    """What orders are made for: times and bytes of each stage, and bytes for activations on each accelerator."""
    cluster, stages = hardware.cluster, shape.stages(cuts)
    placement = looped_placement(shape.counts)
    any_order = Candidate(label="", chain=chain, stages=stages, schedule=_NO_ORDER)
    costs = stage_costs(any_order, hardware)
    held = [inflight_bytes(chain, stage, hardware) for stage in stages]
    found = []
    for index, (stage, (rank,)) in enumerate(zip(stages, placement, strict=True)):
        here, ahead, back = stage.accelerators[0], 0.0, 0.0
        if index + 1 < len(stages) and stages[index + 1].accelerators[0] != here:
            link = cluster.link(here, stages[index + 1].accelerators[0])
            ahead = costs.send_forward[index] / link.bandwidth + link.latency
        if index and stages[index - 1].accelerators[0] != here:
            link = cluster.link(here, stages[index - 1].accelerators[0])
            back = costs.send_backward[index - 1] / link.bandwidth + link.latency
        found.append(
            LoopedStage(
                rank=rank,
                forward=costs.forward[index],
                backward=costs.backward[index],
                send_forward=ahead,
                send_backward=back,
                inflight=held[index].each,
            )
        )
    return found, order_room(chain, stages, placement, hardware, tuning)


_NO_ORDER = interleaved(1, 1, virtual=1)
