"""One schedule under many costs at once: how long its global batch takes in each scenario.

Where every link has one sending lane the order in which tasks run does not depend on their times, so that each
task is timed for all scenarios in one step. The arithmetic is that of `bapipe.simulator.engine`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Lowered, Network, lower
from bapipe.simulator.simulate import cost_places, seconds_by_place, simulate

__all__ = ["ManyCosts", "many_times", "scenario_times"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ManyCosts:
    """What actions and transfers take in each of many cases of one schedule."""

    seconds: Mapping[int, Floats]
    """by kind of action, [stage, case]; [rank, case] with `by_rank`"""
    send_forward: Floats
    """[boundary, case] what crosses from stage i to i+1"""
    send_backward: Floats
    answered: NDArray[np.bool_]
    """[boundary, case] whether a gradient comes back; where none does, nothing waits for it"""
    rate: Floats
    """[from rank, to rank, case] seconds per unit of what crosses"""
    latency: Floats
    """[from rank, to rank, case] seconds"""
    by_rank: bool = False
    """whether replicas of a stage are not alike; of one stage per rank"""


def many_times(schedule: Schedule, network: Network, costs: ManyCosts) -> Floats | None:
    """Seconds of the global batch in each case; None where links are shared, so that each must be simulated alone.

    `network` connects the ranks in one of the cases; the others differ from it in rates and latencies alone. Cost:
    linear in the actions, and nearly independent of the cases up to some hundred.
    """
    lowered = lower(schedule, network)
    if lowered.graph.contended:
        return None
    occupy, latency, arrives = [], [], []
    for channel in lowered.channels:
        amounts = costs.send_forward if channel.onward else costs.send_backward
        ends = channel.from_rank, channel.to_rank
        occupy.append(amounts[channel.boundary] * costs.rate[ends])
        latency.append(costs.latency[ends])
        here = costs.answered[channel.boundary]
        arrives.append(None if channel.onward or here.all() else here)
    cut_through = (network.sending or schedule.sending) == "cut-through"
    places = lowered.ranks if costs.by_rank else lowered.stages
    return _together(lowered, costs.seconds, places.tolist(), occupy, latency, arrives, cut_through=cut_through)


def scenario_times(schedule: Schedule, costs: Sequence[Costs], networks: Sequence[Network]) -> Floats:
    """Seconds of the global batch in each scenario, as `simulate(...).time` has them.

    The networks of all scenarios connect the same ranks and differ in rates and latencies alone. Cost: linear in
    the actions, and nearly independent of the scenarios up to some hundred; where lanes share a link, or the
    pipeline never flushes, each scenario is simulated by itself.
    """
    if len(costs) != len(networks):
        raise BaPipeError(f"{len(costs)} scenarios of costs need as many networks, got {len(networks)}")
    first = networks[0]
    plain = schedule.flushes and schedule.concurrency == "none"
    if plain and first.sending != "blocking" and not first.latency_only:
        lowered = lower(schedule, first, costs[0].unanswered)
        if not lowered.graph.contended:
            cut_through = (first.sending or schedule.sending) == "cut-through"
            seconds = [seconds_by_place(own) for own in costs]
            duration = {kind: np.array([own[kind] for own in seconds]).T for kind in seconds[0]}
            places = cost_places(schedule, costs[0], lowered).tolist()
            channels = _channels(lowered, costs, networks)
            everything = [None] * len(lowered.channels)
            return _together(lowered, duration, places, *channels, everything, cut_through=cut_through)
    both = zip(costs, networks, strict=True)
    return np.array([simulate(schedule, own, network).time for own, network in both])


def _together(
    lowered: Lowered,
    duration: Mapping[int, Floats],
    places: Sequence[int],
    occupy: Sequence[Floats],
    latency: Sequence[Floats],
    arrives: Sequence[NDArray[np.bool_] | None],
    *,
    cut_through: bool,
) -> Floats:
    """All scenarios, task by task: each lane runs as far as its inputs are there.

    `duration` is by kind of action, [place, scenario], and `places` has each task's place there; `occupy` and
    `latency` are by channel, and so is `arrives`: the scenarios in which anything is sent over it, None: all.
    """
    graph = lowered.graph
    lane_start, lane_of, send_to, channel, channel_link, edge_start, edge_to = (
        array.tolist()
        for array in (
            graph.lane_start,
            graph.lane_of,
            graph.send_to,
            graph.channel,
            graph.channel_link,
            graph.edge_start,
            graph.edge_to,
        )
    )
    kinds = lowered.kinds.tolist()
    missing = np.zeros(len(kinds) + 1, np.int64)
    missing[graph.send_to] = 1  # the -1 of a task that sends nothing falls on the extra last entry
    waiting = (missing + np.bincount(graph.edge_to, minlength=len(kinds) + 1)).tolist()
    start = np.zeros(next(iter(duration.values())).shape[1])
    ready: list[Floats | None] = [None] * len(kinds)
    at, ends = lane_start[:-1], [start] * (len(lane_start) - 1)
    free: list[Floats] = [start] * len(channel_link)
    runnable = [lane for lane, task in enumerate(at) if task < lane_start[lane + 1] and not waiting[task]]

    def arrive(target: int, when: Floats, lane: int) -> None:
        known = ready[target]
        ready[target] = when if known is None else np.maximum(known, when)
        waiting[target] -= 1
        other = lane_of[target]
        if not waiting[target] and at[other] == target and other != lane:
            runnable.append(other)

    while runnable:
        lane = runnable.pop()
        task, stop, now = at[lane], lane_start[lane + 1], ends[lane]
        while task < stop and not waiting[task]:
            known = ready[task]
            begin = now if known is None else np.maximum(now, known)
            now = begin + duration[kinds[task]][places[task]]
            ready[task] = None
            target = send_to[task]
            if target >= 0:
                when, over = now, channel[task]
                if over >= 0:
                    link = channel_link[over]
                    claim = np.maximum(free[link], begin if cut_through else now)
                    free[link] = claim + occupy[over]
                    when = np.maximum(now, free[link] + latency[over])
                    if arrives[over] is not None:
                        when = np.where(arrives[over], when, start)
                arrive(target, when, lane)
            for target in edge_to[edge_start[task] : edge_start[task + 1]]:
                arrive(target, now, lane)
            task += 1
        at[lane], ends[lane] = task, now
    assert all(task == stop for task, stop in zip(at, lane_start[1:], strict=True)), (
        "simulated before, so no deadlock"
    )
    return np.asarray(np.max(ends, axis=0), dtype=np.float64)


def _channels(
    lowered: Lowered, costs: Sequence[Costs], networks: Sequence[Network]
) -> tuple[list[Floats], list[Floats]]:
    """[channel][scenario] how long one micro-batch holds it, and how much later it arrives."""
    occupy, latency = [], []
    for channel in lowered.channels:
        routes = [network.route(channel.from_rank, channel.to_rank) for network in networks]
        amounts = [(own.send_forward if channel.onward else own.send_backward)[channel.boundary] for own in costs]
        occupy.append(np.array(amounts) * np.array([route.seconds_per_unit for route in routes]))
        latency.append(np.array([route.latency for route in routes]))
    return occupy, latency
