"""V-shaped pipelines: two stages per accelerator, cut so that each accelerator has as much to do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.evaluate import Candidate, Evaluation, Hardware, StageChoice, evaluate, stage_costs
from bapipe.planner.incumbents import rank
from bapipe.planner.inflight_caps import inflight_bytes
from bapipe.planner.local_moves import moved_cuts
from bapipe.planner.partition.exact.problem import Problem
from bapipe.planner.partition.exact.solve import solve
from bapipe.planner.partition.paper.stage_cuts import starts
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.generators import SCHEDULES
from bapipe.schedule.v_order import VStage, v_orders
from bapipe.schedule.v_shape import v_placement

__all__ = ["v_pipelines"]

Cuts = tuple[int, ...]
"""the last unit of each stage"""
_HOLDS_LESS = {"zb-v": "v-half", "v-half": "v-min"}
_MOVES = 2_000
"""moves of the cuts that are outlined at once"""


def v_pipelines(
    name: str,
    chain: Chain,
    hardware: Hardware,
    microbatches: int,
    *,
    ranks: int,
    within: float = math.inf,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[Evaluation]:
    """The V-shaped schedule of that name on the first accelerators, which must be alike; raises if that cannot be.

    Cuts begin where they balance accelerators, or all stages, and move as long as the published order gets faster
    by that; there, and where there are not too many actions, orders are made for the times and the memory. What
    takes longer than `within` so many seconds is not looked into further; without such a limit the schedules that
    hold less are tried as well, as an order of theirs is one of this schedule, too.
    """
    _require_alike(chain, hardware, ranks)

    def published(cuts: Cuts) -> Evaluation:
        return evaluate(_candidate(name, chain, cuts, microbatches, ranks), hardware)

    tried = {
        cuts: published(cuts)
        for cuts in (
            _balanced_ranks(chain, microbatches, ranks),
            _balanced_stages(chain, hardware, microbatches, ranks),
        )
    }
    best = min(tried.values(), key=rank)
    if best.time > within or 2 * ranks * microbatches > tuning.order_size:
        return [best]
    before = None
    while best is not before:
        before, cuts = best, tuple(stage.last for stage in best.candidate.stages)
        for moved in moved_cuts(cuts, most=tuning.layer_orders):
            if moved not in tried and len(tried) < tuning.layer_orders:
                tried[moved] = published(moved)
                if rank(tried[moved]) < rank(best):
                    best = tried[moved]
                    break
    stages, room = _times(best.candidate, hardware, tuning)
    orders = v_orders(name, stages, microbatches, room=room)
    found = [evaluate(replace(best.candidate, schedule=order), hardware) for order in orders]
    if math.isinf(within) and name in _HOLDS_LESS:
        lighter = v_pipelines(_HOLDS_LESS[name], chain, hardware, microbatches, ranks=ranks, tuning=tuning)
        found += [_renamed(own, best.candidate.label, name, hardware) for own in lighter]
    return found


def _renamed(evaluation: Evaluation, label: str, name: str, hardware: Hardware) -> Evaluation:
    """The same under the name of a schedule that may hold more."""
    candidate = evaluation.candidate
    return evaluate(replace(candidate, label=label, schedule=replace(candidate.schedule, name=name)), hardware)


def _require_alike(chain: Chain, hardware: Hardware, ranks: int) -> None:
    if len(chain.types) > 1 or hardware.cluster.topology == "chain":
        raise BaPipeError(
            "V-shaped schedules need alike accelerators, each connected to any other; choose another --schedule"
        )
    if 2 * ranks > len(chain):
        raise InfeasibleError(
            f"two stages on each of {ranks} accelerators need {2 * ranks} layers, {chain.profile.model.name} has "
            f"{len(chain)}; lower --stages"
        )


def _balanced_stages(chain: Chain, hardware: Hardware, microbatches: int, ranks: int) -> Cuts:
    """Last units of 2N stages of which the longest is as short as can be."""
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


def _balanced_ranks(chain: Chain, microbatches: int, ranks: int) -> Cuts:
    """Last units with which the accelerators, two stages each, have as much to do, and then the stages.

    From even cuts on, by all moves that shorten an outline of the time: what the busiest accelerator does in all
    micro-batches, and the longest stage once per accelerator.
    """
    work = UnitSeconds.of(chain).work[0]
    done = np.concatenate([[0.0], np.cumsum(work)])

    def outline(cuts: Cuts) -> float:
        own = np.diff(done[[0, *(cut + 1 for cut in cuts)]])
        both = own[:ranks] + own[ranks:][::-1]
        return float(microbatches * both.max() + ranks * own.max() + (own**2).sum() / done[-1])

    count, last = 2 * ranks, len(chain) - 1
    wanted = np.searchsorted(done[1:], done[-1] * np.arange(1, count) / count).tolist()
    cuts: Cuts = ()
    for index, cut in enumerate([*wanted, last]):
        cuts += (max(index, cuts[-1] + 1 if cuts else 0, min(cut, last - (count - 1 - index))),)
    while True:
        best = min(moved_cuts(cuts, most=_MOVES), key=outline)
        if outline(best) >= outline(cuts):
            return cuts
        cuts = best


def _candidate(name: str, chain: Chain, cuts: Cuts, microbatches: int, ranks: int) -> Candidate:
    """Stages with these last units in the published order."""
    return Candidate(
        label=f"{name}, {ranks} accelerators with 2 stages each",
        chain=chain,
        stages=tuple(
            StageChoice(first=first, last=last, accelerators=own)
            for first, last, own in zip(starts(cuts), cuts, v_placement(ranks), strict=True)
        ),
        schedule=SCHEDULES[name](ranks, microbatches),
    )


def _times(candidate: Candidate, hardware: Hardware, tuning: Tuning) -> tuple[list[VStage], list[float]]:
    """What orders are made for: times and bytes of each stage, and bytes for activations on each accelerator."""
    chain, stages, cluster = candidate.chain, candidate.stages, hardware.cluster
    costs, ranks = stage_costs(candidate, hardware), len(stages) // 2
    held = [inflight_bytes(chain, stage, hardware) for stage in stages]
    found, last = [], len(stages) - 1
    for index, stage in enumerate(stages):
        ahead = back = 0.0
        here = stage.accelerators[0]
        if index < last and stages[index + 1].accelerators[0] != here:
            link = cluster.link(here, stages[index + 1].accelerators[0])
            ahead = costs.send_forward[index] / link.bandwidth + link.latency
        if index and stages[index - 1].accelerators[0] != here:
            link = cluster.link(here, stages[index - 1].accelerators[0])
            back = costs.send_backward[index - 1] / link.bandwidth + link.latency
        first, second = costs.input_gradient[index], costs.weight_gradient[index]
        if second < tuning.worth_deferring * (costs.forward[index] + first + second):
            first, second = costs.backward[index], 0.0
        found.append(
            VStage(
                forward=costs.forward[index],
                input_gradient=first,
                weight_gradient=second,
                send_forward=ahead,
                send_backward=back,
                inflight=held[index].each,
                delayed=held[index].delayed,
            )
        )
    room = []
    for own in range(ranks):
        memory = cluster.type_of(stages[own].accelerators[0]).memory
        both = held[own].room + held[last - own].room - memory
        room.append(both - tuning.order_spare_memory * memory)
    return found, room
