"""Of many orders of the same stages, the quickest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bapipe.planner.candidate import Candidate, Hardware, accelerators_of_ranks, as_run
from bapipe.planner.candidate_costs import run_costs
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.plan_network import network_of
from bapipe.schedule.actions import Schedule
from bapipe.schedule.channel_window import stops_at
from bapipe.simulator.simulate import simulate

__all__ = ["quickest_orders"]


def quickest_orders(
    candidate: Candidate, orders: Iterable[Schedule], hardware: Hardware, *, most: int
) -> list[Evaluation]:
    """The candidate in so many of the orders at most, from the quickest on; none that stops on channels which hold
    few messages.

    All orders have the candidate's stages on its accelerators: what their actions take is computed once.
    """
    ranks, timed = accelerators_of_ranks(candidate), []
    costs = run_costs(candidate, hardware)
    network = None
    for order in orders:
        schedule = as_run(replace(candidate, schedule=order))
        network = network or network_of(hardware.cluster, ranks, schedule)
        timed.append((simulate(schedule, costs, network).time, order))
    found: list[Evaluation] = []
    for _, order in sorted(timed, key=lambda own: own[0]):
        if len(found) == most:
            break
        if not stops_at(order):
            found.append(evaluate(replace(candidate, schedule=order), hardware))
    return found
