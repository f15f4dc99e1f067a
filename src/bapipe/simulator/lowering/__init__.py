"""From a Schedule to the task graph that `bapipe.simulator.engine` times.

Compute actions become tasks on their lanes. What one stage makes and its neighbour needs is sent from task to task
over a link. With blocking sends each exchange becomes tasks of its own, because both ranks stand still meanwhile.
"""

from __future__ import annotations

from bapipe.schedule.actions import Schedule
from bapipe.simulator.lowering.blocking import lower_blocking
from bapipe.simulator.lowering.nonblocking import lower_links
from bapipe.simulator.lowering.task_graph import BACKWARD_MESSAGE, EXCHANGE, FORWARD_MESSAGE, Channel, Lowered
from bapipe.simulator.network import Network, Route

__all__ = [
    "BACKWARD_MESSAGE",
    "EXCHANGE",
    "FORWARD_MESSAGE",
    "Channel",
    "Lowered",
    "Network",
    "Route",
    "lower",
]


def lower(schedule: Schedule, network: Network, unanswered: tuple[int, ...] = ()) -> Lowered:
    """The task graph of a schedule on a network, no gradient coming back over the `unanswered` boundaries. Linear
    in its actions.

    The schedule remembers the last one, because a schedule is often timed under many costs.
    """
    known: tuple[tuple[Network, tuple[int, ...]], Lowered] | None = vars(schedule).get("_lowered")
    if known is not None and known[0] == (network, unanswered):
        return known[1]
    lowered = (lower_blocking if network.sending == "blocking" else lower_links)(schedule, network, unanswered)
    vars(schedule)["_lowered"] = ((network, unanswered), lowered)
    return lowered
