"""A quicker order of a pipeline's stages, found by moving one action at a time.

Orders are listed greedily, each by one rule of what goes first, and no rule is best for all times. What makes an
order slow is on its critical path: the actions that end when the next one begins, from the first to the last. On
a rank, a run of such actions gets shorter only if the first or the last of them changes places with another one,
as in job shops (Nowicki and Smutnicki 1996). So every action of a run is tried before its first and behind its
last, and before its neighbour; the quickest order of these is gone on from, whether it is quicker or not, until
several in a row were not. Then some actions are moved at random, and the search goes on from there, again and
again (iterated local search): most orders that no single move makes quicker are far from the quickest.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bapipe.planner.candidate import Candidate, Hardware, accelerators_of_ranks, as_run
from bapipe.planner.candidate_costs import run_costs
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.incumbents import lightest
from bapipe.planner.order_times import order_room, order_times
from bapipe.planner.plan_network import network_of
from bapipe.planner.tuning import Tuning
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.channel_window import stops_at
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.v_shape import V_SHAPED
from bapipe.simulator.reordered import Order, OrderTimes, ReorderedSchedule

__all__ = ["MoveEffort", "quicker_order"]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
_TOUCHING = 1e-9
"""seconds between two actions of which the second still counts as begun when the first ended"""
_FARTHEST, _SHUFFLES = 4, 400
"""places that an action is moved at random, at most, and random moves that are tried until enough are possible"""
_Timed = tuple[float, Order, OrderTimes]
"""seconds of a global batch, the order and its times"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEffort:
    """What the search for a quicker order of one pipeline may spend."""

    actions: float
    """of the orders that are simulated"""
    seconds: float = math.inf
    beat: float = math.inf
    """seconds of a global batch; what no order of the stages reaches is not looked into"""


def quicker_order(
    start: Evaluation, hardware: Hardware, tuning: Tuning, *, spend: MoveEffort
) -> Evaluation | None:
    """A plan that `takes_moves` in a quicker order that fits; None where none found is worth having.

    An order holds no more than the schedule's name promises (V shapes) and the accelerators have room for, and
    does not stop on channels that hold few messages. One that holds more has to save `moves_worth_memory`.
    """
    candidate, least = start.candidate, start.time * (1 - tuning.search_gain)
    schedule = as_run(candidate)
    network = network_of(hardware.cluster, accelerators_of_ranks(candidate), schedule)
    graph = ReorderedSchedule(schedule, run_costs(candidate, hardware), network)
    search = _MoveSearch(graph, _Held.of(candidate, schedule, hardware, tuning), spend, tuning)
    found: list[Evaluation] = []
    for _, order in reversed(search.improving()):
        quicker = _reordered(candidate.schedule, graph, order)
        if stops_at(quicker):
            continue
        own = evaluate(replace(candidate, schedule=quicker), hardware)
        if own.short is None and own.time <= least:
            found.append(own)
        if own.time > least or max(own.memory) <= max(start.memory):
            break  # those that follow take longer
    best = lightest([*found, start], within=tuning.moves_worth_memory)
    return None if best is start else best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a rank may hold, and what of it each action takes and lets go."""

    each: tuple[float, ...]
    """bytes of a micro-batch of each stage, from its forward on"""
    delayed: tuple[float, ...]
    """bytes of one that waits for its W"""
    room: tuple[float, ...]
    """bytes that each rank has"""
    most: float
    """activations that a rank holds, all its stages together"""

    @staticmethod
    def of(candidate: Candidate, schedule: Schedule, hardware: Hardware, tuning: Tuning) -> _Held:
        times = order_times(candidate, hardware, tuning)
        bounded = candidate.schedule.name in V_SHAPED
        parted = schedule.parted_stages()
        return _Held(
            each=tuple(own.most if stage in parted else own.inflight for stage, own in enumerate(times)),
            delayed=tuple(own.delayed for own in times),
            room=tuple(
                order_room(candidate.chain, candidate.stages, candidate.schedule.placement, hardware, tuning)
            ),
            most=v_activations(candidate.schedule.name, schedule.num_ranks) if bounded else math.inf,
        )

    def changes(self, kind: int, stage: int) -> tuple[float, int]:
        """Bytes and activations by which an action changes what its rank holds."""
        each, delayed = self.each[stage], self.delayed[stage]
        return {_F: (each, 1), _B: (-each, -1), _I: (delayed - each, 0), _W: (-delayed, -1)}.get(kind, (0.0, 0))


class _MoveSearch:
    """Orders of one schedule, each timed once."""

    def __init__(self, graph: ReorderedSchedule, held: _Held, spend: MoveEffort, tuning: Tuning) -> None:
        self._graph, self._held, self._tuning = graph, held, tuning
        self._random = random.Random(0)
        self._seen = {graph.order}
        self._left = spend.actions // len(graph.lowered.kinds)
        """orders that may be timed"""
        self._until = time.monotonic() + spend.seconds
        lowered = graph.lowered
        self._kinds = lowered.kinds.tolist()
        self._stages = lowered.stages.tolist()
        self._microbatches = lowered.microbatches.tolist()
        self._changes = [held.changes(*own) for own in zip(self._kinds, self._stages, strict=True)]
        self._ranks = [int(lowered.ranks[lane[0]]) if lane else 0 for lane in graph.order]
        self._room = [
            max(held.room[rank], self._peak(lane)[0]) for rank, lane in zip(self._ranks, graph.order, strict=True)
        ]
        self._waits = graph.waits_for()
        times = graph.timed(graph.order)
        assert times is not None, "the candidate was simulated before"
        self._first = times
        self._least = graph.least_seconds(times)
        if self._least >= spend.beat:
            self._left = 0

    def improving(self) -> list[tuple[float, Order]]:
        """The orders that were quicker than all before, in the order in which they were found."""
        found, best = list[tuple[float, Order]](), self._first.seconds
        kept = start = (best, self._graph.order, self._first)
        while best > self._least + _TOUCHING:
            quickest = start
            for quickest in self._descent(start):
                if quickest[0] < best:
                    best = quickest[0]
                    found.append(quickest[:2])
            if quickest[0] <= kept[0] * (1 + self._tuning.order_shuffle_loss):
                kept = quickest
            shuffled = self._shuffled(kept)
            if shuffled is None:
                break
            start = shuffled
        return found

    def _descent(self, start: _Timed) -> Iterator[_Timed]:
        """The start, and from it on each order that is quicker than those before."""
        best, order, times = start
        yield start
        since = 0
        while since <= self._tuning.order_move_patience:
            tried: list[_Timed] = []
            for changed in self._neighbours(order, times):
                own = self._time(changed)
                if own is not None:
                    tried.append((own.seconds, changed, own))
            if not tried:
                return
            seconds, order, times = min(tried, key=lambda item: item[0])
            since += 1
            if seconds < best - _TOUCHING:
                best, since = seconds, 0
                yield seconds, order, times

    def _shuffled(self, start: _Timed) -> _Timed | None:
        """The order with some actions moved a few places, at random; None where nothing is left to spend."""
        order, times, moved = start[1], start[2], 0
        for _ in range(_SHUFFLES):
            lane = self._random.randrange(len(order))
            place = self._random.randrange(len(order[lane]))
            target = min(place + self._random.randint(1, _FARTHEST), len(order[lane]) - 1)
            if self._random.random() < 0.5:
                place, target = target, place
            changed = self._moved(order[lane], place, target)
            if place == target or changed is None or not self._allowed(lane, changed):
                continue
            trial = (*order[:lane], changed, *order[lane + 1 :])
            own = self._time(trial)
            if own is not None:
                order, times, moved = trial, own, moved + 1
                if moved == self._tuning.order_shuffles:
                    return times.seconds, order, times
        return None

    def _time(self, order: Order) -> OrderTimes | None:
        """When each action runs; None where they wait for each other, the order is known or nothing is left."""
        if order in self._seen or self._left <= 0 or time.monotonic() > self._until:
            return None
        self._seen.add(order)
        self._left -= 1
        return self._graph.timed(order)

    def _neighbours(self, order: Order, times: OrderTimes) -> Iterator[Order]:
        """The order with one action moved within a run of the critical path, and nothing held that may not be."""
        for lane, first, last in self._runs(order, times):
            own, moves = order[lane], dict[tuple[int, int], None]()
            moves |= dict.fromkeys((place, place + 1) for place in range(first, last))
            moves |= dict.fromkeys((place, last) for place in range(first, last))
            moves |= dict.fromkeys((place, first) for place in range(first + 1, last + 1))
            for place, target in moves:
                changed = self._moved(own, place, target)
                if changed is not None and self._allowed(lane, changed):
                    yield (*order[:lane], changed, *order[lane + 1 :])

    def _runs(self, order: Order, times: OrderTimes) -> list[tuple[int, int, int]]:
        """Lane, first and last place of neighbours on the critical path, two at least."""
        places = {task: (lane, place) for lane, own in enumerate(order) for place, task in enumerate(own)}
        start, end, arrival = times.start.tolist(), times.end.tolist(), times.arrival.tolist()
        task = int(times.end.argmax())
        runs = [[*places[task], places[task][1]]]
        while start[task] > _TOUCHING:
            lane, place = places[task]
            if place and end[order[lane][place - 1]] >= start[task] - _TOUCHING:
                task = order[lane][place - 1]
            else:
                waited = self._waits[task]
                if not waited:
                    break
                # What is sent over a link arrives after its sender's end; over none it is there at the end.
                task = max(waited, key=lambda own: end[own] if math.isnan(arrival[own]) else arrival[own])
            lane, place = places[task]
            if runs[-1][0] == lane and runs[-1][1] == place + 1:
                runs[-1][1] = place
            else:
                runs.append([lane, place, place])
        return [(lane, first, last) for lane, first, last in runs if last > first]

    def _moved(self, lane: Sequence[int], place: int, target: int) -> tuple[int, ...] | None:
        """The lane with one action at another place; None where it would pass one that it must not."""
        task = lane[place]
        passed = lane[place + 1 : target + 1] if target > place else lane[target:place]
        if any(self._kept(task, other) for other in passed):
            return None
        rest = (*lane[:place], *lane[place + 1 :])
        return (*rest[:target], task, *rest[target:])

    def _kept(self, one: int, other: int) -> bool:
        """Whether two actions of a rank stay in their order: of one micro-batch, or of one kind, of one stage; and
        everything that ends the global batch."""
        kinds = self._kinds
        if max(kinds[one], kinds[other]) > _W:
            return True
        same_microbatch: bool = self._microbatches[one] == self._microbatches[other]
        return self._stages[one] == self._stages[other] and (kinds[one] == kinds[other] or same_microbatch)

    def _allowed(self, lane: int, actions: Sequence[int]) -> bool:
        held, most = self._peak(actions)
        return held <= self._room[lane] and most <= self._held.most

    def _peak(self, actions: Sequence[int]) -> tuple[float, int]:
        """Bytes and activations of a rank at most."""
        held = list(itertools.accumulate((self._changes[task][0] for task in actions), initial=0.0))
        count = itertools.accumulate((self._changes[task][1] for task in actions), initial=0)
        return max(held), max(count)


def _reordered(schedule: Schedule, graph: ReorderedSchedule, order: Order) -> Schedule:
    """The schedule in that order, without what `as_run` has added."""
    lanes = []
    for own, (kinds, stages, microbatches) in zip(schedule.lanes, graph.lanes(order), strict=True):
        kept = kinds <= _W
        lanes.append(Lane(own.rank, kinds[kept], stages[kept], microbatches[kept], own.name))
    caps = schedule.caps
    if caps is not None:
        caps = tuple(_most_held(lanes, stage) for stage in range(schedule.num_stages))
    return replace(schedule, lanes=tuple(lanes), caps=caps)


def _most_held(lanes: Sequence[Lane], stage: int) -> int:
    """Micro-batches of a stage at once, from F to the end of their backward."""
    steps = {_F: 1, _B: -1, _W: -1}
    kinds = (
        steps.get(kind, 0)
        for lane in lanes
        for kind, own in zip(lane.kinds.tolist(), lane.stages.tolist(), strict=True)
        if own == stage
    )
    return max(itertools.accumulate(kinds))
