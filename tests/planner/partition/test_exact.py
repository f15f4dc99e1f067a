"""The exact partitioner on problems small enough to check by hand, its guards and its words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import bapipe.planner.partition.exact.solve as exact
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.partition.exact import problem_tables, windows
from bapipe.planner.partition.exact.dual import raise_bound
from bapipe.planner.partition.exact.kernels import Backend
from bapipe.planner.partition.exact.solve import Choice, Problem, Solution, score, solve


def chain(times: list[float], *, stages: int, **rest: Any) -> Problem:
    """Layers that only have a forward, on `stages` accelerators that must all be used."""
    given = {"counts": stages, "microbatches": 20, "num_stages": stages, **rest}
    return Problem.unlimited(forward=times, backward=np.zeros(len(times)), **given)


def layers_of(solution: Solution) -> list[tuple[int, int]]:
    return [(stage.first_layer, stage.last_layer) for stage in solution.stages]


@pytest.mark.parametrize(("times", "least"), [([1, 4, 1, 1, 2], 4), ([1, 1, 1, 1, 2], 2)])
def test_known_bottlenecks(times: list[float], least: float) -> None:
    for minimise in ("time", "bottleneck"):
        solution = solve(chain(times, stages=3), minimise=minimise)  # type: ignore[arg-type]
        assert solution.bottleneck == least
        assert solution.steady == 19 * least
        assert solution.objective == sum(times) + 19 * least
        assert solution.exact


def test_time_of_alike_stages_is_the_papers() -> None:
    # 3 stages of F + B = 3 and 2 cuts of SR = 0.5 each way, M = 10: BaPipe's Table 1.
    sends = np.full(2, 0.5)
    for communication, expected in [
        ("overlapped", (10 + 3 - 1) * 3 + (3 - 1) * 2 * 0.5),
        ("exposed", (10 + 3 - 1) * 3 + (3 + 10 - 2) * 2 * 0.5),
    ]:
        problem = Problem.unlimited(
            forward=np.ones(3),
            backward=np.full(3, 2.0),
            counts=3,
            microbatches=10,
            send_forward=sends,
            send_backward=sends,
            num_stages=3,
            count_communication=communication,
        )
        assert solve(problem).objective == pytest.approx(expected)


def test_few_microbatches_do_not_pay_for_cuts() -> None:
    problem = Problem.unlimited(
        forward=np.ones(4),
        backward=np.ones(4),
        counts=4,
        microbatches=2,
        send_forward=np.full(3, 3.0),
        send_backward=np.full(3, 3.0),
    )
    assert layers_of(solve(problem)) == [(0, 3)]
    assert solve(replace(problem, microbatches=100)).objective < 2 * 100 * 4
    assert len(solve(replace(problem, microbatches=100)).stages) > 1


def test_the_faster_type_gets_more_layers_and_the_better_place() -> None:
    # Type 1 is three times faster, and on layer 3 ten times: it comes last whatever the order of the counts.
    forward = np.array([[1.0, 1.0, 1.0, 10.0], [0.33, 0.33, 0.33, 1.0]])
    problem = Problem.unlimited(forward=forward, backward=np.zeros((2, 4)), counts=[1, 1], microbatches=100)
    solution = solve(problem)
    assert [(stage.type, stage.first_layer) for stage in solution.stages] == [(0, 0), (1, 1)]
    turned = solve(replace(problem, order=(1, 0), use_all=True))
    assert [stage.type for stage in turned.stages] == [1, 0]
    assert turned.objective > solution.objective


def test_a_chain_uses_neighbours_only() -> None:
    # The two fast ones at the ends of the chain cannot work together without the slow one between them.
    forward = np.array([[1.0, 1.0], [100.0, 100.0]])
    problem = Problem.unlimited(forward=forward, backward=np.zeros((2, 2)), counts=[2, 1], microbatches=50)
    assert len(solve(problem).stages) == 2
    assert len(solve(replace(problem, order=(0, 1, 0))).stages) == 1
    assert len(solve(replace(problem, order=(1, 0, 0))).stages) == 2


def test_forbidden_cuts_are_kept() -> None:
    sends = np.array([0.0, np.inf, 0.0, np.inf])
    solution = solve(chain([1, 1, 1, 1, 1], stages=3, send_forward=sends, send_backward=np.zeros(4)))
    assert solution.cuts == (1, 3)


def test_a_slow_link_moves_the_cut() -> None:
    sends = np.array([0.0, 9.0, 0.0])
    assert solve(chain([1, 1, 1, 1], stages=2, send_forward=sends, send_backward=sends)).cuts != (2,)


def test_memory_counts_micro_batches_alive() -> None:
    # Stage 0 of 2 keeps 2 micro-batches, stage 1 one: 3 units saved fit as 1·2 + 2·1, not as 2·2 + 1·1.
    limits: dict[str, Any] = {"saved_bytes": np.ones(3), "capacity": np.array([2])}
    solution = solve(chain([1, 1, 5], stages=2, **limits))
    assert solution.cuts == (1,)
    assert [stage.memory for stage in solution.stages] == [2, 2]
    assert solve(chain([1, 1, 5], stages=2)).cuts == (2,)


def test_recomputation_buys_memory_with_time() -> None:
    limits: dict[str, Any] = {"saved_bytes": np.full(4, 10), "input_bytes": np.ones(4), "capacity": np.array([25])}
    with pytest.raises(InfeasibleError, match="5 short; lower the micro-batch size, allow recomputation or add"):
        solve(chain([1, 1, 1, 1], stages=2, **limits))
    solution = solve(chain([1, 1, 1, 1], stages=2, recompute="allowed", **limits))
    assert [stage.recompute for stage in solution.stages] == [True, False]
    assert (solution.stages[0].forward, solution.stages[0].backward) == (2, 2)
    assert [stage.memory for stage in solution.stages] == [22, 20]
    always = solve(chain([1, 1, 1, 1], stages=2, recompute="always", **limits))
    assert always.objective > solution.objective


def test_replicas_share_a_heavy_layer() -> None:
    problem = Problem.unlimited(
        forward=[1.0, 9.0, 1.0],
        backward=np.zeros(3),
        counts=5,
        microbatches=30,
        max_replicas=3,
        reduce_rate=np.array([0, 0, 1, 1]),
        gradient_bytes=np.array([50, 0, 50]),
        saved_bytes=np.array([0, 6, 0]),
    )
    solution = solve(problem)
    assert [stage.replicas for stage in solution.stages] == [1, 3, 1]
    assert solution.steady == 9 * 9
    assert solution.update == 0
    assert solution.bottleneck == 3
    # Of the 4 micro-batches alive at the middle stage each replica holds 2.
    assert solution.stages[1].memory == 2 * 6
    dear = solve(replace(problem, gradient_bytes=np.full(3, 10**6)))
    assert {stage.replicas for stage in dear.stages} == {1}


def test_narrow_neighbours_slow_a_link_down() -> None:
    choices = [
        Choice(first_layer=0, last_layer=0, type=0, replicas=2),
        Choice(first_layer=1, last_layer=1, type=0),
    ]
    problem = Problem.unlimited(
        forward=[1.0, 1.0],
        backward=np.zeros(2),
        counts=3,
        microbatches=9,
        max_replicas=2,
        send_forward=np.array([4.0]),
        send_backward=np.array([3.0]),
    )
    assert score(problem, choices).steady == 8 * 4
    assert score(replace(problem, duplex_half=True), choices).steady == 8 * 7
    wide = [choices[0], replace(choices[1], replicas=2)]
    assert score(replace(problem, counts=np.array([4]), inflight=np.arange(5)), wide).steady == 4 * 4


def test_half_duplex_links_add_up() -> None:
    sends = {"send_forward": np.array([2.0]), "send_backward": np.array([2.0])}
    assert solve(chain([1, 1], stages=2, **sends)).steady == 19 * 2
    assert solve(chain([1, 1], stages=2, duplex_half=True, **sends)).steady == 19 * 4


def test_charges_without_end_are_noticed() -> None:
    # Only two accelerators of the fast type, of which there is one, would keep the threshold. The bound then has
    # no limit; it once grew until sums lost their digits, and a slower plan was called optimal.
    problem = Problem.unlimited(
        forward=[[1.0, 1.0], [100.0, 100.0]], backward=np.zeros((2, 2)), counts=[1, 1], microbatches=2
    )
    tables = problem_tables.prepare(problem, backend=Backend(compiled=False))
    area = windows.bound(tables, steady=1.0, update=np.inf)
    assert area.states > 0
    raised = raise_bound(tables, area, charges=np.zeros(2), target=np.inf)
    assert raised.optimal
    assert raised.found is None
    assert raised.best.bound == np.inf
    assert not raised.best.charges.any()


def test_a_stage_that_fits_only_behind_the_furthest_reach_is_found() -> None:
    # The last stage alone reaches layer 2, and no stage in front of it can then hold layer 1 four times; a shorter
    # last stage leaves room for layer 2. The windows once missed that.
    problem = Problem.unlimited(
        forward=np.ones((2, 5)),
        backward=np.zeros((2, 5)),
        counts=[1, 2],
        order=(0, 1, 1),
        microbatches=4,
        weights_bytes=np.array([12, 0, 8, 18, 15]),
        saved_bytes=np.array([13, 15, 12, 0, 1]),
        capacity=np.array([89, 56]),
        inflight=np.array([7, 1, 5, 1]),
    )
    assert layers_of(solve(problem)) == [(0, 1), (2, 2), (3, 4)]


def test_free_order_is_no_worse_than_any_chain() -> None:
    rng = np.random.default_rng(3)
    problem = Problem.unlimited(
        forward=rng.uniform(1, 2, (3, 40)),
        backward=rng.uniform(1, 2, (3, 40)),
        counts=[2, 2, 2],
        microbatches=12,
        send_forward=rng.uniform(0, 3, 39),
        send_backward=rng.uniform(0, 3, 39),
    )
    free = solve(problem)
    order = tuple(stage.type for stage in free.stages)
    assert len(order) == 6
    assert solve(replace(problem, order=order)).objective == pytest.approx(free.objective)
    assert solve(replace(problem, order=(0, 0, 1, 1, 2, 2))).objective >= free.objective


def large(**rest: Any) -> Problem:
    rng = np.random.default_rng(1)
    return Problem.unlimited(
        forward=rng.uniform(1, 2, (2, 60)) * np.array([[1.0], [1.5]]),
        backward=rng.uniform(1, 2, (2, 60)),
        counts=[4, 4],
        microbatches=16,
        send_forward=rng.uniform(0, 3, 59),
        send_backward=rng.uniform(0, 3, 59),
        **rest,
    )


def test_engines_agree_to_the_last_bit() -> None:
    pytest.importorskip("numba")
    for rest in ({}, {"recompute": "allowed"}, {"count_communication": "exposed"}, {"max_replicas": 3}):
        assert solve(large(**rest), engine="numba") == solve(large(**rest), engine="python")


def test_a_guard_ends_the_search_and_says_so() -> None:
    proved = solve(large(), engine="python")
    assert proved.exact
    assert proved.lower_bound == proved.objective
    hasty = solve(large(), engine="python", max_states=200)
    assert not hasty.exact
    assert hasty.lower_bound <= proved.objective <= hasty.objective
    with pytest.raises(BaPipeError, match="need more states than max_states, got 1; raise it, or group layers"):
        solve(large(), engine="python", max_states=1)


def test_too_many_counts_leave_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = solve(large(), engine="python")
    monkeypatch.setattr(problem_tables, "MAX_NODES", 1)
    relaxed = solve(large(), engine="python")
    assert relaxed.lower_bound <= proved.objective * (1 + 1e-9)
    assert proved.objective <= relaxed.objective * (1 + 1e-9)
    assert relaxed.exact == (relaxed.lower_bound == relaxed.objective)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 5}, "5 stages need 5 accelerators, got 2; lower num_stages"),
        ({"num_stages": 1, "use_all": True}, "use_all makes 2 stages of one accelerator, got num_stages 1"),
        ({"counts": 9, "use_all": True}, "9 stages need at least 9 layers, got 3; lower the number of stages"),
        (
            {"num_stages": 2, "send_forward": np.full(2, np.inf)},
            "2 stages need 1 cuts, got 0 that are allowed; lower the number of stages",
        ),
        (
            {"weights_bytes": np.array([3, 9, 3]), "capacity": np.array([7]), "overhead": np.array([1])},
            r"layer 1 alone needs 9 bytes, got 6 on the roomiest accelerator \(type 0\): 3 short; lower",
        ),
        (
            {"weights_bytes": np.array([5, 5, 5]), "capacity": np.array([7])},
            r"every plan is short of memory; in the nearest one found stage \d \(layers \d to \d on type 0\) "
            "needs 10 bytes, got 7: 3 short; lower the micro-batch size, allow recomputation or add accelerators",
        ),
    ],
)
def test_why_there_is_no_plan(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"counts": 2, "microbatches": 4, **change}
    with pytest.raises(InfeasibleError, match=message):
        solve(Problem.unlimited(forward=np.ones(3), backward=np.ones(3), **given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward": np.ones(4)}, r"backward must have shape \(1, 3\), got \(1, 4\); match it to forward"),
        ({"backward": -np.ones(3)}, "backward must not be negative or NaN, got -1.0; correct the profile"),
        ({"forward": np.array([1, np.inf, 1])}, "forward must be finite, got inf; correct the profile"),
        ({"counts": 0}, "counts must hold an accelerator"),
        ({"microbatches": 0}, "microbatches must be at least 1, got 0"),
        ({"max_replicas": 0}, "max_replicas must be at least 1, got 0"),
        ({"inflight": np.arange(2)}, "inflight must have 3 entries"),
        ({"reduce_rate": np.zeros(1)}, "reduce_rate must have 2 entries"),
        ({"recompute": "maybe"}, "recompute must be never, allowed or always, got 'maybe'"),
        ({"count_communication": "no"}, "count_communication must be overlapped or exposed, got 'no'"),
        (
            {"num_stages": 2, "max_replicas": 2},
            "num_stages counts stages of one accelerator .* leave one of them out",
        ),
        ({"order": (0,)}, r"order must name each of the \[2\] accelerators of each type once"),
        ({"weights_bytes": np.array([1, np.nan, 1])}, "weights_bytes must be numbers, got NaN"),
        ({"saved_bytes": np.full(3, 2**60)}, r"bytes of all layers must stay under 2\*\*62"),
    ],
)
def test_mistakes_in_a_problem_are_told(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "forward": np.ones(3),
        "backward": np.ones(3),
        "counts": 2,
        "microbatches": 4,
        **change,
    }
    with pytest.raises(BaPipeError, match=message):
        Problem.unlimited(**given)


def test_mistakes_in_a_plan_are_told() -> None:
    problem = chain([1, 1, 1], stages=2, weights_bytes=np.full(3, 4), capacity=np.array([7]))
    first, second = (Choice(first_layer=a, last_layer=b, type=0) for a, b in [(0, 0), (1, 2)])
    with pytest.raises(
        InfeasibleError, match=r"stage 1 \(layers 1 to 2 on type 0\) needs 8 bytes, got 7: 1 short"
    ):
        score(problem, [first, second])
    with pytest.raises(BaPipeError, match=r"stages must follow one another from layer 0, got first layers \[1\]"):
        score(problem, [second])
    with pytest.raises(BaPipeError, match="stages must end at layer 2, got 0; add the rest"):
        score(problem, [first])
    walled = chain([1, 1], stages=2, send_forward=np.array([np.inf]))
    with pytest.raises(InfeasibleError, match="the cut after layer 0 is forbidden, got a stage 0 that ends there"):
        score(walled, [first, replace(second, last_layer=1)])
    with pytest.raises(BaPipeError, match="minimise must be time or bottleneck, got 'cost'"):
        solve(problem, minimise="cost")  # type: ignore[arg-type]


def test_exports() -> None:
    assert all(hasattr(exact, name) for name in exact.__all__)
    assert len(set(exact.__all__)) == len(exact.__all__)


def test_small_problems_do_not_load_numba() -> None:
    code = (
        "import sys; from bapipe.planner.partition.exact.solve import Problem, solve\n"
        "solve(Problem.unlimited(forward=[1, 2, 3], backward=[1, 2, 3], counts=2, microbatches=4))\n"
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
