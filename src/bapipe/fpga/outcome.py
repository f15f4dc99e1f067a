"""Cuts on boards under a schedule, dimensioned exactly and timed by the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.fpga.exact_cuts import Run
from bapipe.fpga.parking import Parked, park
from bapipe.fpga.schedule_rules import Rule
from bapipe.fpga.stage_sizing import StageLoad, load_stage
from bapipe.hardware.cluster import Cluster
from bapipe.planner.plan_network import network_of
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import with_update
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

__all__ = ["Crossing", "Outcome", "costs_of", "dimension", "simulated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A cut between two boards."""

    forward: float
    """bytes per image to the next board"""
    backward: float
    """bytes per image back"""
    period: float
    """seconds per micro-batch within which the transfers hide"""
    busy: float
    """seconds per micro-batch that the link is busy"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A pipeline that could be built."""

    run: Run
    offset: int
    """the first of its boards in the cluster"""
    cuts: tuple[int, ...]
    loads: tuple[StageLoad, ...]
    crossings: tuple[Crossing, ...]
    parked: tuple[Parked, ...]
    period: float
    """P, seconds per micro-batch: the longest of all stages and cuts, which all boards keep"""
    update: float
    """seconds of the optimizer steps after the last backward"""
    time: float
    """seconds per global batch by the closed form, which the simulator confirms"""

    @property
    def rule(self) -> Rule:
        return self.run.rule

    @property
    def fits(self) -> bool:
        return self.period < float("inf")

    @property
    def demands(self) -> tuple[tuple[str, int, float], ...]:
        """Seconds per micro-batch that every "dsp", "ddr" and "link" asks for, the longest first."""
        found = [("dsp", i, float(self.rule.slots(load.fill)) * load.compute) for i, load in enumerate(self.loads)]
        found += [("ddr", i, self.rule.microbatch * load.ddr) for i, load in enumerate(self.loads)]
        found += [("link", i, crossing.period) for i, crossing in enumerate(self.crossings)]
        return tuple(sorted(found, key=lambda item: -item[2]))

    @property
    def binding(self) -> tuple[str, int]:
        """What sets the period: "dsp", "ddr" or "link", and of which stage or cut."""
        kind, index, _ = self.demands[0]
        return kind, index

    @property
    def bound_by(self) -> tuple[str, ...]:
        """The kinds of resource within a hundredth of the period: balanced cuts often make two of them meet."""
        return tuple(dict.fromkeys(kind for kind, _, time in self.demands if time >= 0.99 * self.period))


def dimension(
    run: Run, offset: int, cuts: Sequence[int], *, known: dict[tuple[int, int, int], StageLoad] | None = None
) -> Outcome:
    """Load every board exactly and find the period that all keep.

    `known` remembers stages between calls; while it is given nothing is parked.
    """
    remembered = {} if known is None else known
    loads = []
    for index, (first, stop) in enumerate(itertools.pairwise([0, *cuts])):
        key = (index, first, stop)
        if key not in remembered:
            remembered[key] = load_stage(
                run.units,
                first,
                stop,
                run.boards[index],
                run.rule,
                behind=run.depth - index,
                copies=run.copies,
                parameters=run.parameters,
            )
        loads.append(remembered[key])
    crossings = tuple(_crossing(run, index, cut) for index, cut in enumerate(cuts[:-1]))
    parked: tuple[Parked, ...] = ()
    if run.parameters.parking and known is None:
        loads, parked = park(run, loads, [(item.forward, item.backward) for item in crossings])
    period = max([load.period for load in loads] + [item.period for item in crossings])
    update = max(load.update - run.rule.head_start(index, period) for index, load in enumerate(loads))
    busy = max((item.busy for item in crossings), default=0.0)
    return Outcome(
        run=run,
        offset=offset,
        cuts=tuple(cuts),
        loads=tuple(loads),
        crossings=crossings,
        parked=parked,
        period=period,
        update=update,
        time=run.rule.time(period, run.depth, transfer=busy, update=update),
    )


def _crossing(run: Run, index: int, cut: int) -> Crossing:
    size, link = run.boards[index].element, run.links[index]
    forward, backward = float(run.units.forward[cut]) * size, float(run.units.backward[cut]) * size
    return Crossing(
        forward=forward,
        backward=backward,
        period=float(run.rule.link_period(forward, backward, link)),
        busy=float(run.rule.transfer(forward, backward, link)),
    )


def costs_of(outcome: Outcome) -> Costs:
    """What the simulator is given: every board at the common period, as lockstep streaming has it."""
    rule, count = outcome.rule, len(outcome.loads)
    forward = rule.forward_share * outcome.period
    backward = outcome.period - forward
    return Costs(
        forward=(forward,) * count,
        backward=(backward,) * count,
        send_forward=tuple(item.forward * rule.microbatch for item in outcome.crossings),
        send_backward=tuple(item.backward * rule.microbatch for item in outcome.crossings),
        input_gradient=(backward / 2,) * count,
        weight_gradient=(backward / 2,) * count,
        recompute=(forward,) * count,
        all_reduce=(0.0,) * count,
        update=tuple(load.update for load in outcome.loads),
    )


def simulated(outcome: Outcome, cluster: Cluster) -> tuple[Schedule, Timeline]:
    """The schedule with its optimizer steps, and every action of it timed."""
    schedule = with_update(outcome.rule.order(len(outcome.loads)))
    ranks = tuple(range(outcome.offset, outcome.offset + len(outcome.loads)))
    return schedule, simulate(schedule, costs_of(outcome), network_of(cluster, ranks, schedule))
