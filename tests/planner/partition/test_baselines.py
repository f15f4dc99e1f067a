"""The baselines do what their systems are known to do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bapipe.errors import BaPipeError
from bapipe.planner.partition.baselines import by_parameter_spread, by_parameters, by_time, pipedream, uniform
from bapipe.planner.partition.exact.solve import Problem, solve


def sums(values: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(values[a:b]) for a, b in itertools.pairwise((0, *cuts, len(values)))]


def test_uniform_gives_the_first_stages_one_more() -> None:
    # DeepSpeed pull request 4053 gives this example.
    assert uniform(38, 8) == (5, 10, 15, 20, 25, 30, 34)
    assert uniform(8, 4) == (2, 4, 6)
    assert uniform(5, 1) == ()


def test_uniform_leaves_the_last_stages_empty() -> None:
    assert uniform(2, 4) == (1, 2, 2)


def test_parameters_fill_from_the_front() -> None:
    # DeepSpeed pull request 4312: release 0.10.3 returns [0, 2, 4, 5, 5].
    assert by_parameters([1, 1, 1, 1, 1], 4) == (2, 4, 5)
    assert sums([3, 1, 1, 1, 3, 3], by_parameters([3, 1, 1, 1, 3, 3], 3)) == [5, 4, 3]


def test_parameters_give_way_to_a_heavy_first_layer() -> None:
    assert by_parameters([10, 1, 1], 2) == (0,)


def test_parameters_and_uniform_agree_on_too_few_layers() -> None:
    assert by_parameters([5, 1], 4) == by_parameter_spread([5, 1], 4) == uniform(2, 4)


def test_parameter_spread_is_what_newer_deepspeed_returns() -> None:
    # DeepSpeed's own tests accept [0, 1, 2, 3, 5] and [0, 2, 3, 4, 5].
    assert by_parameter_spread([1, 1, 1, 1, 1], 4) in [(1, 2, 3), (2, 3, 4)]
    assert by_parameter_spread([1, 1, 1, 1], 4) == (1, 2, 3)
    parts = sums([1, 1, 1, 1, 0, 1], by_parameter_spread([1, 1, 1, 1, 0, 1], 4))
    assert max(parts) - min(parts) == 1


def test_block_partitions_of_torchgpipes_examples() -> None:
    assert by_time([1, 2, 3, 4, 5, 6], 2) == (4,)
    assert by_time([6, 5, 4, 3, 2, 1], 2) == (2,)
    assert by_time([3, 3, 3], 3) == (1, 2)


def test_block_partitions_stop_short_of_the_optimum() -> None:
    times = [1.0, 1.0, 1.0, 1.0, 2.0]
    assert max(sums(times, by_time(times, 3))) == 4
    problem = Problem.unlimited(forward=times, backward=np.zeros(5), counts=3, microbatches=9, num_stages=3)
    assert solve(problem, minimise="bottleneck").bottleneck == 2


def test_block_partitions_need_a_layer_per_stage() -> None:
    with pytest.raises(BaPipeError, match="3 stages need at least 3 layers, got 2; lower the number of stages"):
        by_time([1, 2], 3)


@pytest.mark.parametrize("seed", range(8))
def test_straight_pipedream_finds_the_least_bottleneck(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, transfer = rng.uniform(1, 5, 12), rng.uniform(0, 4, 11)
    plan = pipedream(
        times.tolist(), transfer=transfer.tolist(), synchronise=[0.0] * 12, machines=4, unreplicated=True
    )
    problem = Problem.unlimited(
        forward=times,
        backward=np.zeros(12),
        counts=4,
        microbatches=50,
        send_forward=transfer,
        send_backward=transfer,
        duplex_half=True,
        num_stages=4,
    )
    assert plan.replicas == (1, 1, 1, 1)
    assert plan.bottleneck == pytest.approx(solve(problem, minimise="bottleneck").bottleneck)


def test_pipedream_replicates_what_is_cheap_to_synchronise() -> None:
    # The first layer is slow and has no weights, the second has many: 3 machines for one, 1 for the other.
    plan = pipedream([6.0, 2.0], transfer=[0.5], synchronise=[0.0, 10.0], machines=4)
    assert plan.cuts == (1,)
    assert plan.replicas == (3, 1)
    assert plan.bottleneck == 2.0


def test_pipedream_prefers_data_parallelism_without_weights() -> None:
    plan = pipedream([1.0, 4.0, 1.0, 1.0, 2.0], transfer=[0.1] * 4, synchronise=[0.0] * 5, machines=3)
    assert plan.cuts == ()
    assert plan.replicas == (3,)
    assert plan.bottleneck == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_replicated_pipedream_equals_every_plan_tried(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, transfer, weights = rng.uniform(1, 5, 5), rng.uniform(0, 2, 4), rng.uniform(0, 2, 5)

    def cost(cuts: tuple[int, ...], replicas: tuple[int, ...]) -> float:
        parts = [2 * transfer[cut - 1] for cut in cuts]
        for (a, b), r in zip(itertools.pairwise((0, *cuts, 5)), replicas, strict=True):
            parts.append(max(times[a:b].sum(), 2 * (r - 1) * weights[a:b].sum()) / r)
        return max(parts)

    every = [
        cost(cuts, replicas)
        for count in range(1, 5)
        for cuts in itertools.combinations(range(1, 5), count - 1)
        for replicas in itertools.product(range(1, 5), repeat=count)
        if sum(replicas) == 4
    ]
    plan = pipedream(times.tolist(), transfer=transfer.tolist(), synchronise=weights.tolist(), machines=4)
    assert plan.bottleneck == pytest.approx(min(every))
    assert cost(plan.cuts, plan.replicas) == pytest.approx(plan.bottleneck)


def test_mistakes_are_told() -> None:
    with pytest.raises(BaPipeError, match="stages must be at least 1, got 0; raise it"):
        uniform(3, 0)
    with pytest.raises(BaPipeError, match="layers must be at least 1, got 0"):
        by_parameters([], 2)
    with pytest.raises(BaPipeError, match="4 stages need at least 4 layers, got 2; lower machines"):
        pipedream([1.0, 2.0], transfer=[0.0], synchronise=[0.0, 0.0], machines=4, unreplicated=True)
    with pytest.raises(BaPipeError, match="must have 1 and 2 entries, got 2 and 2"):
        pipedream([1.0, 2.0], transfer=[0.0, 0.0], synchronise=[0.0, 0.0], machines=1)
