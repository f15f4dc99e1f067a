"""V-shaped pipelines: two stages per accelerator, cut so that each accelerator has as much to do."""

from __future__ import annotations

import math
from dataclasses import replace

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.incumbents import rank
from bapipe.planner.local_moves import moved_cuts
from bapipe.planner.looped_cuts import Cuts, balanced_ranks, fastest_first, looped_bound
from bapipe.planner.order_times import order_room, order_times
from bapipe.planner.partition.exact.problem import Problem
from bapipe.planner.partition.exact.solve import solve
from bapipe.planner.partition.paper.stage_cuts import starts
from bapipe.planner.pipelines import with_cuts
from bapipe.planner.quickest_orders import quickest_orders
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.planner.varied_times import varied_times
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import SCHEDULES
from bapipe.schedule.v_order import V_CHOICES, v_order
from bapipe.schedule.v_shape import v_placement

__all__ = ["v_pipelines"]

_HOLDS_LESS = {"zb-v": "v-half", "v-half": "v-min"}


def v_pipelines(
    name: str,
    chain: Chain,
    hardware: Hardware,
    microbatches: int,
    *,
    ranks: int,
    beat: float = math.inf,
    lighter: bool = False,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[Evaluation]:
    """The V-shaped schedule of that name on the fastest accelerators; raises if that cannot be.

    Cuts begin where they balance accelerators, or all stages, and move as long as the published order gets faster
    by that; there, and where there are not too many actions, orders are made for the times and the memory. What
    is not near the `beat` seconds of the best that is known is not looked into further. With `lighter` the
    schedules that hold less are tried as well, as an order of theirs is one of this schedule, too. Of several
    types the fastest accelerators come first, or last.
    """
    _require_ranks(chain, hardware, ranks)
    found: list[Evaluation] = []
    for order, cuts in _placements(chain, hardware, microbatches, ranks):
        best = _published(name, chain, hardware, microbatches, order, cuts, beat, tuning)
        if best.time > tuning.near_best * beat or 2 * ranks * microbatches > tuning.order_size:
            found.append(best)
        else:
            found += _ordered(name, best.candidate, hardware, microbatches, beat, tuning)
        beat = min([beat, *(own.time for own in found if own.short is None)])
    if lighter and name in _HOLDS_LESS and 2 * ranks * microbatches <= tuning.order_size:
        others = v_pipelines(
            _HOLDS_LESS[name], chain, hardware, microbatches, ranks=ranks, lighter=True, tuning=tuning
        )
        found += [_renamed(own, found[0].candidate.label, name, hardware) for own in others]
    return found


def _published(
    name: str,
    chain: Chain,
    hardware: Hardware,
    microbatches: int,
    order: tuple[int, ...],
    first: list[Cuts],
    beat: float,
    tuning: Tuning,
) -> Evaluation:
    """The best cuts by the published order, from the first ones on as long as it gets faster."""

    schedule = SCHEDULES[name](len(order), microbatches)

    def published(cuts: Cuts) -> Evaluation:
        return evaluate(_candidate(chain, cuts, schedule, order), hardware)

    tried = {cuts: published(cuts) for cuts in first}
    best, before = min(tried.values(), key=rank), None
    if best.time > tuning.near_best * beat or 2 * len(order) * microbatches > tuning.order_size:
        return best
    while best is not before and not _too_much(best):
        before, cuts = best, tuple(stage.last for stage in best.candidate.stages)
        for moved in moved_cuts(cuts, most=tuning.layer_orders):
            if moved not in tried and len(tried) < tuning.layer_orders:
                tried[moved] = published(moved)
                if rank(tried[moved]) < rank(best):
                    best = tried[moved]
                    break
    return best


def _too_much(evaluation: Evaluation) -> bool:
    """Whether all accelerators together lack memory, so that moved cuts would not help."""
    half = len(evaluation.memory) // 2  # each accelerator has two stages
    return sum(evaluation.memory[:half]) > sum(evaluation.capacity[:half])


def _ordered(
    name: str, start: Candidate, hardware: Hardware, microbatches: int, beat: float, tuning: Tuning
) -> list[Evaluation]:
    """The candidate's stages in orders made for their times and memory, the published one first.

    Where the quickest that fits is near `beat` seconds, the cuts are moved as long as an order of theirs is
    quicker, whichever preference it is made by, and orders are made for times near these as well.
    """

    def made(cuts: Cuts, *, variations: int = 0) -> list[Evaluation]:
        moved = replace(start, stages=with_cuts(start.stages, cuts))
        stages = order_times(moved, hardware, tuning)
        room = order_room(moved.chain, moved.stages, moved.schedule.placement, hardware, tuning)
        orders = [start.schedule]
        if name != "dualpipe-v":  # whose order has no other meaning
            orders += (
                v_order(name, times, microbatches, choice, room=room)
                for times in (stages, *varied_times(stages, variations))
                for choice in V_CHOICES
            )
        return quickest_orders(moved, orders, hardware, most=tuning.orders_simulated)

    cuts = tuple(stage.last for stage in start.stages)
    found = made(cuts)
    quickest, tried, left = min(found, key=rank), {cuts}, tuning.v_order_actions
    if name == "dualpipe-v" or quickest.short is not None or quickest.time > (1 + tuning.cuts_save) * beat:
        return found
    before = None
    while quickest is not before:
        before = quickest
        nearest_first = sorted(moved_cuts(cuts, most=tuning.layer_orders), key=lambda own: _differing(own, cuts))
        for moved in nearest_first:
            if moved in tried or left <= 0:
                continue
            tried.add(moved)
            left -= len(V_CHOICES) * start.schedule.num_actions
            best = min(made(moved), key=rank)
            if best.short is None and best.time < quickest.time * (1 - tuning.order_gain):
                quickest, cuts = best, moved
                break
    return made(cuts, variations=tuning.time_variations)


def _differing(one: Cuts, other: Cuts) -> int:
    """How many cuts differ."""
    return sum(first != second for first, second in zip(one, other, strict=True))


def _renamed(evaluation: Evaluation, label: str, name: str, hardware: Hardware) -> Evaluation:
    """The same under the name of a schedule that may hold more."""
    candidate = evaluation.candidate
    return evaluate(replace(candidate, label=label, schedule=replace(candidate.schedule, name=name)), hardware)


def _placements(
    chain: Chain, hardware: Hardware, microbatches: int, ranks: int
) -> list[tuple[tuple[int, ...], list[Cuts]]]:
    """Accelerators of the ranks and cuts to begin with; of several types the placement first whose cuts are bound
    to take less."""
    cluster, of_stage = hardware.cluster, tuple(rank for (rank,) in v_placement(ranks))
    if len(chain.types) == 1:
        alike = balanced_ranks(chain, of_stage, (0,) * ranks, microbatches)
        cuts = dict.fromkeys((alike, _balanced_stages(chain, hardware, microbatches, ranks)))
        return [(tuple(range(ranks)), list(cuts))]
    fastest = fastest_first(chain, cluster, ranks)
    found = []
    for order in (fastest, fastest[::-1]):
        rows = tuple(chain.row(cluster.accelerators[index].type) for index in order)
        own = balanced_ranks(chain, of_stage, rows, microbatches)
        found.append((looped_bound(chain, of_stage, rows, own, microbatches), order, [own]))
    return [(order, cuts) for _, order, cuts in sorted(found)]


def _require_ranks(chain: Chain, hardware: Hardware, ranks: int) -> None:
    if hardware.cluster.topology == "chain":
        raise BaPipeError(
            "V-shaped schedules need accelerators that are each connected to any other; choose another --schedule"
        )
    if 2 * ranks > len(chain):
        raise InfeasibleError(
            f"two stages on each of {ranks} accelerators need {2 * ranks} layers, {chain.profile.model.name} has "
            f"{len(chain)}; lower --stages"
        )


def _balanced_stages(chain: Chain, hardware: Hardware, microbatches: int, ranks: int) -> Cuts:
    """Last units of 2N stages of which the longest is as short as can be; of alike accelerators."""
    link, units = hardware.cluster.within, UnitSeconds.of(chain)
    problem = Problem.unlimited(
        forward=units.forward,
        backward=units.backward,
        counts=[2 * ranks],
        microbatches=microbatches,
        send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
        send_backward=chain.boundary_backward[:-1] / link.bandwidth + link.latency,
        num_stages=2 * ranks,
    )
    return tuple(stage.last_layer for stage in solve(problem).stages)


def _candidate(chain: Chain, cuts: Cuts, schedule: Schedule, accelerators: tuple[int, ...]) -> Candidate:
    """Stages with these last units in this order, on the accelerators of the ranks."""
    ranks = len(accelerators)
    return Candidate(
        label=f"{schedule.name}, {ranks} accelerators with 2 stages each",
        chain=chain,
        stages=tuple(
            StageChoice(first=first, last=last, accelerators=(accelerators[rank],))
            for first, last, (rank,) in zip(starts(cuts), cuts, v_placement(ranks), strict=True)
        ),
        schedule=schedule,
    )
