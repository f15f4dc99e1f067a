"""The time per micro-batch of an endless pipeline, in closed form."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network

__all__ = ["steady_period"]


def steady_period(schedule: Schedule, costs: Costs, network: Network | None = None) -> float:
    """λ: time per micro-batch of an endless capped 1F1B pipeline without replicas.

    λ = max of every stage's F+B, every link's time, and over i<j of the loop through stages i..j:
    [Σ(F+B) + Σ(SF+SB)] / (K_i − K_j + 1), where on cut-through links only what outlasts the compute counts. No
    loop goes through a boundary over which no gradient comes back. It is reached, not only a bound, where every
    direction has a link of its own. A denominator of 0 or less is a deadlock. Cost: O(N²).
    """
    network = network or Network()
    sending = network.sending or schedule.sending
    if schedule.caps is None:
        raise BaPipeError(f"{schedule.name} has no caps, so it has no steady period; use a 1f1b schedule")
    if sending == "blocking":
        raise BaPipeError(f"{schedule.name} has no known steady period with blocking sends; choose other links")
    N = schedule.num_stages
    work = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    busy: dict[Hashable, float] = {}
    exposed = []
    for stage in range(N - 1):
        ahead, behind = schedule.placement[stage][0], schedule.placement[stage + 1][0]
        between = 0.0
        for ends, amount, compute in (
            ((ahead, behind), costs.send_forward[stage], costs.forward[stage]),
            ((behind, ahead), costs.send_backward[stage], costs.backward[stage + 1]),
        ):
            route, link = network.route(*ends), network.link(*ends)
            seconds = amount * route.seconds_per_unit
            busy[link] = busy.get(link, 0.0) + seconds
            for uplink, rate in route.uplinks:
                busy[uplink] = busy.get(uplink, 0.0) + amount * rate
            hidden = compute if sending == "cut-through" else 0.0
            between += max(0.0, seconds + route.latency - hidden)
        exposed.append(between)
    period = max(work)
    if not network.latency_only:
        period = max(period, *busy.values(), 0.0)
    caps = np.array([min(cap, 2**53) for cap in schedule.caps])
    steps = np.array(work[1:]) + np.array(exposed)
    for i in range(N - 1):
        last = next((boundary for boundary in sorted(costs.unanswered) if boundary >= i), N - 1)
        loops = np.cumsum(np.concatenate([[work[i]], steps[i:last]]))[1:]
        turns = caps[i] - caps[i + 1 : last + 1] + 1
        if not len(turns):
            continue
        if turns.min() <= 0:
            j = i + 1 + int(np.argmax(turns <= 0))
            raise DeadlockError(
                f"stage {i} may hold {schedule.caps[i]} micro-batches but stage {j} wants "
                f"{schedule.caps[j]} before its first backward; raise the cap of stage {i}"
            )
        period = max(period, float((loops / turns).max()))
    return period
