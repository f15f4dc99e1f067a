"""One schedule with the actions of its ranks in other orders: when each action runs, without lowering it again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Lowered, Network, lower
from bapipe.simulator.simulate import TaskSeconds, task_seconds

__all__ = ["Order", "OrderTimes", "ReorderedSchedule"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Order = tuple[tuple[int, ...], ...]
"""of each lane its actions, by their numbers in the schedule: lane after lane, from 0 on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTimes:
    """When each action runs in one order, by its number in the schedule."""

    start: Floats
    end: Floats
    arrival: Floats
    """of what it sends; NaN where it sends nothing over a link"""

    @property
    def seconds(self) -> float:
        return float(self.end.max())


class ReorderedSchedule:
    """A schedule whose actions may change places on their lanes; links do not block.

    What waits for what stays, but for what the schedule's own order already kept: who moves an action keeps it
    behind its own forward and, as W, behind its own I, and micro-batches of one stage and kind in their order.
    """

    def __init__(self, schedule: Schedule, costs: Costs, network: Network) -> None:
        if network.sending == "blocking" or schedule.concurrency != "none":
            raise BaPipeError("only schedules with one action at a time and sends that do not block are reordered")
        self.lowered: Lowered = lower(schedule, network, costs.unanswered)
        self._seconds: TaskSeconds = task_seconds(schedule, costs, self.lowered, network)
        graph = self.lowered.graph
        self._edges = np.diff(graph.edge_start)
        self.order: Order = tuple(
            tuple(range(first, last)) for first, last in itertools.pairwise(graph.lane_start.tolist())
        )
        """as the schedule has it"""

    def timed(self, order: Order) -> OrderTimes | None:
        """When each action runs, as `simulate` has it to the last bit; None where actions wait for each other.

        Cost: that of the timing kernel, and some array operations.
        """
        graph, tasks = self.lowered.graph, np.array([task for lane in order for task in lane], np.int64)
        place = np.empty(len(tasks) + 1, np.int64)
        place[tasks], place[-1] = np.arange(len(tasks)), -1
        edge_start, edge_to = graph.edge_start, graph.edge_to
        if len(edge_to):
            counts = self._edges[tasks]
            edge_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            within = np.arange(edge_start[-1]) - np.repeat(edge_start[:-1], counts)
            edge_to = place[edge_to[np.repeat(graph.edge_start[tasks], counts) + within]]
        times = self._seconds.timed(
            replace(
                graph,
                send_to=place[graph.send_to[tasks]],
                channel=graph.channel[tasks],
                edge_start=edge_start,
                edge_to=edge_to,
            ),
            duration=self._seconds.duration[tasks],
        )
        if times.done < len(tasks):
            return None
        start, end, arrival = np.empty((3, len(tasks)))
        start[tasks], end[tasks], arrival[tasks] = times.start, times.end, times.arrival
        return OrderTimes(start=start, end=end, arrival=arrival)

    def least_seconds(self, times: OrderTimes) -> float:
        """What every order takes: all actions of a lane follow its first one, the first in every order."""
        duration = self._seconds.duration
        return max(float(times.start[lane[0]] + duration[list(lane)].sum()) for lane in self.order if lane)

    def waits_for(self) -> list[list[int]]:
        """For each action those on other lanes, or before it, that it waits for, senders first."""
        graph, found = self.lowered.graph, [list[int]() for _ in range(len(self.lowered.kinds))]
        for sender, target in enumerate(graph.send_to.tolist()):
            if target >= 0:
                found[target].append(sender)
        before = np.repeat(np.arange(len(self._edges)), self._edges).tolist()
        for task, target in zip(before, graph.edge_to.tolist(), strict=True):
            found[target].append(task)
        return found

    def lanes(self, order: Order) -> Sequence[tuple[Ints, Ints, Ints]]:
        """Kinds, stages and micro-batches of each lane in that order."""
        lowered = self.lowered
        rows = [np.array(lane, np.int64) for lane in order]
        return [(lowered.kinds[row], lowered.stages[row], lowered.microbatches[row]) for row in rows]
