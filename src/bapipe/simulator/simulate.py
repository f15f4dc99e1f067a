"""(Schedule, Costs, Network) -> Timeline: what a schedule takes on given hardware, without running it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.actions import Kind, Schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.engine import Engine, TaskGraph, TaskTimes, time_tasks
from bapipe.simulator.lowering import EXCHANGE, Lowered, Network, lower
from bapipe.simulator.steady_period import steady_period
from bapipe.simulator.timeline import Timeline, Transfers

__all__ = ["TaskSeconds", "cost_places", "seconds_by_place", "simulate", "task_seconds"]


Floats = NDArray[np.float64]


_BY_KIND = (
    (Kind.F, "forward"),
    (Kind.B, "backward"),
    (Kind.I, "input_gradient"),
    (Kind.W, "weight_gradient"),
    (Kind.R, "recompute"),
    (Kind.U, "update"),
)


def simulate(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    engine: Engine = "auto",
) -> Timeline:
    """Time every action of the schedule.

    Linear in the number of actions. Raises DeadlockError naming a rank and the action it waits at.
    """
    if costs.num_stages != schedule.num_stages:
        raise BaPipeError(f"the schedule has {schedule.num_stages} stages but the costs are of {costs.num_stages}")
    network = network or Network()
    if network.sending == "blocking" and schedule.concurrency != "none":
        raise BaPipeError(f"{schedule.name} runs F and B at once, so it cannot block on sends; choose other links")
    lowered = lower(schedule, network, costs.unanswered)
    if schedule.concurrency == "slots":
        work, _ = _durations(schedule, costs, lowered)
        times = _lockstep(schedule, costs, lowered, network, work)
    else:
        seconds = task_seconds(schedule, costs, lowered, network)
        work, times = seconds.work, seconds.timed(lowered.graph, engine=engine)
        if times.done < len(work):
            raise _deadlock(lowered, times)
    return _timeline(schedule, costs, lowered, network, times, work)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSeconds:
    """What the tasks of a lowered schedule and its channels take, whatever order the tasks have on their lanes."""

    work: Floats
    """of each task"""
    duration: Floats
    """how long each task holds its lane"""
    occupy: Floats
    """how long a transfer holds each channel"""
    latency: Floats
    """how much later it arrives"""
    uplink_occupy: Floats | None
    """how long a transfer holds each uplink of each channel"""
    cut_through: bool

    def timed(self, graph: TaskGraph, *, duration: Floats | None = None, engine: Engine = "auto") -> TaskTimes:
        """When each task runs; `duration` is given where the graph has the tasks in another order."""
        return time_tasks(
            graph,
            duration=self.duration if duration is None else duration,
            occupy=self.occupy,
            latency=self.latency,
            uplink_occupy=self.uplink_occupy,
            cut_through=self.cut_through,
            engine=engine,
        )


def task_seconds(schedule: Schedule, costs: Costs, lowered: Lowered, network: Network) -> TaskSeconds:
    """Of a schedule whose lanes run freely (not in slots)."""
    work, duration = _durations(schedule, costs, lowered)
    occupy, latency = _channel_times(costs, lowered, network)
    return TaskSeconds(
        work=work,
        duration=duration,
        occupy=occupy,
        latency=latency,
        uplink_occupy=None if network.latency_only else _uplink_seconds(costs, lowered),
        cut_through=(network.sending or schedule.sending) == "cut-through",
    )


def _durations(schedule: Schedule, costs: Costs, lowered: Lowered) -> tuple[Floats, Floats]:
    """Per task: the work it does, and the time it holds its lane."""
    seconds = seconds_by_place(costs)
    table = np.zeros((EXCHANGE + 1, len(seconds[int(Kind.F)])))
    for kind, values in seconds.items():
        table[kind] = values
    work: Floats = table[lowered.kinds, cost_places(schedule, costs, lowered)]
    if lowered.first_message is not None:
        work[lowered.first_message :] = _channel_seconds(costs, lowered) + _channel_latency(lowered)
    if schedule.concurrency != "static":
        return work, work
    # Each half of the compute units takes as long as both together take for forward and backward.
    whole = np.array(costs.forward) + np.array(costs.backward)
    both = (lowered.kinds == Kind.F) | (lowered.kinds == Kind.B)
    return work, np.where(both, whole[lowered.stages], work)


def cost_places(schedule: Schedule, costs: Costs, lowered: Lowered) -> NDArray[np.int64]:
    """For each task, where `seconds_by_place` has what it takes: its stage, or behind all stages its replica."""
    if costs.replicas is None:
        return lowered.stages
    places, place = lowered.stages.copy(), schedule.num_stages
    for stage, own in enumerate(costs.replicas):
        for rank in schedule.placement[stage][: len(own)]:
            places[(lowered.stages == stage) & (lowered.ranks == rank)] = place
            place += 1
    return places


def seconds_by_place(costs: Costs) -> dict[int, list[float]]:
    """By kind of action, seconds of every stage, and behind them of every replica of stages whose are unlike."""
    single = [(stage, item) for stage, own in enumerate(costs.replicas or ()) for item in own]
    found = {
        int(kind): [*getattr(costs, name), *(getattr(item, name) for _, item in single)] for kind, name in _BY_KIND
    }
    found[int(Kind.A)] = [*costs.all_reduce, *(costs.all_reduce[stage] for stage, _ in single)]
    return found


def _channel_seconds(costs: Costs, lowered: Lowered) -> Floats:
    """How long one micro-batch holds each channel."""
    return np.array(
        [
            (costs.send_forward if channel.onward else costs.send_backward)[channel.boundary] * channel.rate
            for channel in lowered.channels
        ]
    )


def _channel_latency(lowered: Lowered) -> Floats:
    return np.array([channel.latency for channel in lowered.channels])


def _channel_times(costs: Costs, lowered: Lowered, network: Network) -> tuple[Floats, Floats]:
    """How long a transfer holds each channel, and how much later it arrives."""
    occupy, latency = _channel_seconds(costs, lowered), _channel_latency(lowered)
    return (np.zeros(len(occupy)), occupy + latency) if network.latency_only else (occupy, latency)


def _uplink_seconds(costs: Costs, lowered: Lowered) -> Floats:
    """How long one micro-batch holds each uplink of each channel."""
    return np.array(
        [
            (costs.send_forward if channel.onward else costs.send_backward)[channel.boundary] * rate
            for channel in lowered.channels
            for _, rate in channel.uplinks
        ],
        dtype=np.float64,
    )


def _lockstep(schedule: Schedule, costs: Costs, lowered: Lowered, network: Network, work: Floats) -> TaskTimes:
    """FBP's table slots: F(m,i) in slot m+i, B(m,i) in slot m+2N−1−i (from 0), all ranks in step.

    A slot costs the longest work active on one rank, or all that crosses the busiest link if that takes longer (it
    adds up if links send after the compute). Updates follow the last slot.
    """
    N, M = schedule.num_stages, schedule.num_microbatches
    forward, last = lowered.kinds == Kind.F, np.isin(lowered.kinds, (Kind.A, Kind.U))
    slot = lowered.microbatches + np.where(forward, lowered.stages, 2 * N - 1 - lowered.stages)
    load = np.zeros((M + 2 * N - 1, N))
    np.add.at(load, (slot[~last], lowered.stages[~last]), work[~last])
    occupy, latency = _channel_times(costs, lowered, network)
    link = lowered.graph.channel_link
    transfer = float((np.bincount(link, occupy)[link] + latency).max()) if len(link) else 0.0
    if len(lowered.graph.uplink) and not network.latency_only:
        transfer = max(transfer, float(np.bincount(lowered.graph.uplink, _uplink_seconds(costs, lowered)).max()))
    compute = load.max(axis=1)
    after = (network.sending or schedule.sending) == "after-compute"
    edges = np.concatenate([[0.0], np.cumsum(compute + transfer if after else np.maximum(compute, transfer))])
    start, end = edges[slot], edges[slot + 1]
    start[last] = edges[-1]
    end[last] = edges[-1] + work[last]
    sends = lowered.graph.channel >= 0
    return TaskTimes(
        start=start,
        end=end,
        sent=np.where(sends, start, np.nan),
        arrival=np.where(sends, end, np.nan),
        done=len(start),
    )


def _deadlock(lowered: Lowered, times: TaskTimes) -> DeadlockError:
    waiting = []
    starts = lowered.graph.lane_start
    for low, high in itertools.pairwise(starts):
        waits = np.isnan(times.end[low:high]) & (lowered.kinds[low:high] <= Kind.U)
        if waits.any():
            stuck = int(low) + int(np.argmax(waits))
            microbatch = int(lowered.microbatches[stuck])
            name = f"{lowered.stages[stuck]}{Kind(int(lowered.kinds[stuck])).name}"
            waiting.append(f"rank {lowered.ranks[stuck]} at {name}{'' if microbatch < 0 else microbatch}")
    where = ", ".join(waiting[:4]) + (" …" if len(waiting) > 4 else "")
    how = "reorder these actions" if lowered.first_message is None else "use links that do not block, or reorder"
    return DeadlockError(f"deadlock: {where} wait for ever; {how}")


def _timeline(
    schedule: Schedule, costs: Costs, lowered: Lowered, network: Network, times: TaskTimes, work: Floats
) -> Timeline:
    action: slice | NDArray[np.bool_] = slice(None)
    sent, arrived = times.sent[lowered.senders], times.arrival[lowered.senders]
    if lowered.first_message is not None:
        action = lowered.kinds <= Kind.U
        sent, arrived = times.start[lowered.first_message :], times.end[lowered.first_message :]
    transfers = Transfers(
        source=lowered.senders,
        to_rank=lowered.receiving_ranks,
        start=sent,
        arrival=arrived,
        target=lowered.receivers,
    )
    period = None if schedule.flushes else steady_period(schedule, costs, network)
    return Timeline(
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        kinds=lowered.kinds[action],
        stages=lowered.stages[action],
        microbatches=lowered.microbatches[action],
        ranks=lowered.ranks[action],
        lanes=lowered.lanes[action],
        start=times.start[action],
        end=times.end[action],
        work=work[action],
        transfers=transfers,
        period=period,
    )
