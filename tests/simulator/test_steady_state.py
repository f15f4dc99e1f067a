"""A short simulation that repeats itself says what the long one takes."""

from __future__ import annotations

import numpy as np
import pytest

from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import capped, gpipe
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.steady_state import microbatches_needed, steady_state

ROUNDS = 12


def made(microbatches: int, shape: dict[str, list[int]]) -> Schedule:
    caps, stages = shape["caps"], len(shape["caps"])
    if "delays" in shape:
        return zero_bubble(stages, microbatches, caps, delays=shape["delays"])
    return capped(stages, microbatches, caps, replicas=shape["replicas"])


def random_shape(generator: np.random.Generator) -> dict[str, list[int]]:
    stages = int(generator.integers(1, 6))
    caps = sorted((int(cap) for cap in generator.integers(1, 9, stages)), reverse=True)
    if generator.random() < 0.4:
        return {"caps": caps, "delays": [int(delay) for delay in generator.integers(0, 4, stages)]}
    return {"caps": caps, "replicas": [int(count) for count in generator.integers(1, 4, stages)]}


def random_costs(generator: np.random.Generator, stages: int) -> Costs:
    return Costs.of(
        stages,
        forward=generator.uniform(1.0, 3.0, stages).tolist(),
        backward=generator.uniform(2.0, 6.0, stages).tolist(),
        transfer=generator.uniform(0.0, 2.0, max(0, stages - 1)).tolist(),
        all_reduce=generator.uniform(0.0, 5.0, stages).tolist(),
        update=0.5,
    )


def test_what_is_left_out_takes_what_it_takes_when_simulated() -> None:
    generator = np.random.default_rng(24)
    found = 0
    for _ in range(60):
        shape = random_shape(generator)
        costs = random_costs(generator, len(shape["caps"]))
        span = ROUNDS * int(np.lcm.reduce(shape.get("replicas", [1])))
        short = 2 * microbatches_needed(made(60, shape))
        whole = short + span * int(generator.integers(1, 5))
        order = made(short, shape)
        timeline = simulate(order, costs)
        steady = steady_state(order, timeline)
        if steady is None:
            continue
        longer = steady.longer(whole - short)
        assert longer is not None
        found += 1
        expected = simulate(made(whole, shape), costs).time
        assert timeline.time + longer == pytest.approx(expected, rel=1e-9)
    assert found >= 50


def test_an_order_that_does_not_repeat_itself_is_not_taken_to() -> None:
    """GPipe has no steady state: its backwards begin once all forwards have ended."""
    order = gpipe(3, 200)
    timeline = simulate(order, Costs.of(3, forward=1.0, backward=2.0, transfer=0.5))
    assert steady_state(order, timeline) is None


def test_too_few_micro_batches_show_nothing() -> None:
    order = capped(4, 12, [4, 3, 2, 1])
    assert microbatches_needed(order) > 12
    assert steady_state(order, simulate(order, Costs.of(4, forward=1.0, backward=2.0))) is None


def test_only_whole_repetitions_are_added() -> None:
    order = capped(2, 200, [4, 2], replicas=[2, 1])
    steady = steady_state(order, simulate(order, Costs.of(2, forward=1.0, backward=2.0)))
    assert steady is not None
    assert steady.every % 2 == 0
    assert steady.longer(1) is None
    assert steady.longer(2 * steady.every) == pytest.approx(2 * steady.seconds)
