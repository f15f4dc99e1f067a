"""Many scenarios at once take what each takes by itself."""

from __future__ import annotations

import numpy as np
import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import (
    capped,
    data_parallel,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
)
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.scenario_times import scenario_times
from bapipe.simulator.simulate import simulate

SCHEDULES = {
    "1f1b": make_schedule("1f1b-so", 4, 7),
    "gpipe": with_recompute(make_schedule("gpipe", 3, 5), [0, 2]),
    "zb": make_schedule("zb-h2", 4, 6),
    "interleaved": interleaved(2, 6, virtual=2),
    "hybrid": capped(2, 6, [4, 3], name="1f1b", replicas=[3, 2]),
    "data-parallel": data_parallel(3, 6),
    "cut-through": make_schedule("1f1b-as", 3, 5),
    "never flushes": make_schedule("pipedream", 3, 6),
}


def scenario(schedule: Schedule, generator: np.random.Generator, *, shared: bool) -> tuple[Costs, Network]:
    stages = schedule.num_stages
    costs = Costs.of(
        stages,
        forward=generator.uniform(1, 3, stages).tolist(),
        backward=generator.uniform(3, 6, stages).tolist(),
        transfer=generator.uniform(0, 4, stages - 1).tolist(),
        transfer_backward=generator.uniform(0, 4, stages - 1).tolist(),
        all_reduce=1.5,
        update=generator.uniform(0, 1, stages).tolist(),
    )
    ranks = range(schedule.num_ranks)
    routes = {
        (one, other): Route(
            seconds_per_unit=float(generator.uniform(0.5, 2)),
            latency=float(generator.uniform(0, 0.3)),
            link="bus" if shared else None,
        )
        for one in ranks
        for other in ranks
    }
    return costs, Network(routes=routes)


@pytest.mark.parametrize("shared", [False, True], ids=["own links", "a bus"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_times_of_scenarios_are_those_of_the_simulator_to_the_last_bit(name: str, shared: bool) -> None:
    schedule, generator = SCHEDULES[name], np.random.default_rng(3)
    if schedule.flushes:
        schedule = with_update(schedule)
    costs, networks = zip(*(scenario(schedule, generator, shared=shared) for _ in range(5)), strict=True)
    alone = [simulate(schedule, *both).time for both in zip(costs, networks, strict=True)]
    assert scenario_times(schedule, costs, networks).tolist() == alone
    assert len(set(alone)) == 5


def test_every_scenario_needs_a_network() -> None:
    schedule = make_schedule("1f1b-so", 2, 2)
    with pytest.raises(BaPipeError, match="2 scenarios of costs need as many networks, got 1"):
        scenario_times(schedule, [Costs.of(2, forward=1, backward=1)] * 2, [Network()])
