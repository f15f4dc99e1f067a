"""Uplinks: transfers that cross the same one wait for each other, each for as long as its bytes take there."""

from __future__ import annotations

import pytest

from bapipe.schedule.generators import capped
from bapipe.schedule.replicas import replicated_pipelines
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.engine import numba_available
from bapipe.simulator.lowering import Network, Route, lower
from bapipe.simulator.simulate import simulate
from bapipe.simulator.steady_period import steady_period

TWO = replicated_pipelines([capped(2, 1, [1, 1])] * 2)
"""two pipelines of two stages, one micro-batch each: ranks 0 and 1 send to 2 and 3"""
COSTS = Costs.of(2, forward=1.0, backward=2.0, transfer=8.0)


def network(*uplinks: tuple[str, float], rate: float = 1.0, back: tuple[tuple[str, float], ...] = ()) -> Network:
    """Links of their own, which cross these uplinks ahead and those back."""
    routes = {}
    for rank in (0, 1):
        routes[rank, rank + 2] = Route(seconds_per_unit=rate, uplinks=uplinks)
        routes[rank + 2, rank] = Route(seconds_per_unit=rate, uplinks=back)
    return Network(routes=routes)


def arrivals(used: Network) -> list[float]:
    return sorted(simulate(TWO, COSTS, used).transfers.arrival.tolist())


def test_without_uplinks_both_send_at_once() -> None:
    assert arrivals(network()) == [9, 9, 20, 20]


def test_a_full_uplink_is_taken_in_turn() -> None:
    assert arrivals(network(("out", 1.0))) == [9, 17, 20, 28]


def test_a_wide_uplink_is_shared_by_several() -> None:
    """A quarter of the uplink each: the second starts when the bytes of the first take no more of it."""
    assert arrivals(network(("out", 0.25))) == [9, 11, 20, 22]


def test_the_last_of_several_uplinks_to_be_free_counts() -> None:
    assert arrivals(network(("node", 0.25), ("rack", 0.5))) == [9, 13, 20, 24]


def test_both_ways_may_share_one() -> None:
    """1F and 2F of both ends are over before the first error comes back, which crosses the same uplink."""
    shared = (("both", 1.0),)
    assert arrivals(network(*shared, back=shared)) == [9, 17, 25, 33]


def test_what_only_one_channel_crosses_costs_nothing() -> None:
    alone = Network(
        routes={
            (0, 2): Route(uplinks=(("a", 1.0),)),
            (2, 0): Route(),
            (1, 3): Route(uplinks=(("b", 1.0),)),
            (3, 1): Route(),
        }
    )
    assert not lower(TWO, alone).graph.contended
    assert arrivals(alone) == [9, 9, 20, 20]


@pytest.mark.skipif(not numba_available(), reason="numba is not installed")
def test_both_engines_agree() -> None:
    used = network(("node", 0.3), ("rack", 0.7))
    schedule = replicated_pipelines([capped(2, 6, [2, 1])] * 2)
    one, other = (simulate(schedule, COSTS, used, engine=name).end.tolist() for name in ("python", "numba"))  # type: ignore[arg-type]
    assert one == other


def test_the_steady_period_counts_all_that_crosses() -> None:
    costs = Costs.of(3, forward=1.0, backward=2.0, transfer=4.0)
    shared = (("rack", 0.5),)
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    crossing = Network(routes={pair: Route(uplinks=shared) for pair in ends})
    schedule = capped(3, 16, [9, 5, 1])
    assert steady_period(schedule, costs) == pytest.approx(4.0)
    assert steady_period(schedule, costs, crossing) == pytest.approx(4 * 4.0 * 0.5)
