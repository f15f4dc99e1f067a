"""A sample of benchmarks/reliability/model_check.py: the checker's verdict on an order is what a model of ranks
and transports, which shares no code with it, does with that order."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "reliability"))

from model_check import Check, tiny_placements
from order_cases import all_orders, generated, known_deadlock, made, random_order
from order_model import gets_to_its_end, processes_of, reachable_ends

from bapipe.errors import DeadlockError
from bapipe.schedule.actions import Action, Kind
from bapipe.schedule.channel_window import ChannelBounds, stops_at
from bapipe.schedule.validate import check, require_valid


def test_generated_orders() -> None:
    """Every size, and of each size some of the orders; no two neighbouring sizes have the same ones."""
    found = Check()
    for number, (stages, microbatches) in enumerate(itertools.product(range(1, 5), range(1, 7))):
        for name, schedule in itertools.islice(generated(stages, microbatches), number % 12, None, 12 * stages):
            found.order(f"{name}, N={stages}, M={microbatches}", schedule)
    assert found.different == []
    assert found.counts["orders"] > 60


def test_all_orders_of_tiny_pipelines_in_all_interleavings() -> None:
    found = Check()
    for placement, microbatches in itertools.islice(tiny_placements(), 3):
        for number, schedule in enumerate(all_orders(placement, microbatches)):
            found.order(f"order {number} of {placement}", schedule, every_interleaving=len(placement) == 2)
    assert found.different == []
    assert found.counts["deadlocks"] > 0
    assert found.counts["orders explored whole"] > 60


def test_random_orders_and_other_bounds() -> None:
    found = Check(transports=("gloo", "ipc"))
    for seed in range(40):
        schedule = random_order(seed)
        found.order(f"random {seed}", schedule)
        if seed % 4 == 1:
            found.bounds(f"random {seed}", schedule)
    assert found.different == []
    assert found.counts["deadlocks of other bounds"] > 0


@pytest.mark.parametrize(("microbatches", "passes"), [(6, True), (7, False)])
def test_the_known_deadlock(microbatches: int, passes: bool) -> None:
    now, before = Check(), Check(rule="preposted")
    for one in (now, before):
        one.order("known", known_deadlock(microbatches))
    assert now.different == []
    assert bool(now.counts["deadlocks"]) is not passes
    assert [name.removeprefix("known, ") for name in before.different] == (
        [] if passes else ["gloo", "staged", "nccl", "ipc", "two global batches"]
    ), "a checker that says that sends never block is found out"


def test_activations_that_no_gradient_answers_are_bounded() -> None:
    """Rank 0 sends all of stage 0 before it runs stage 2, whose results rank 1 waits for after each of stage 1."""
    every = range(7)
    first = [Action(stage, kind, item) for stage, kind in ((0, Kind.F), (2, Kind.F)) for item in every]
    second = [Action(stage, Kind.F, item) for item in every for stage in (1, 3)]
    back = {rank: [Action(stage, Kind.B, item) for item in every for stage in (rank + 2, rank)] for rank in (0, 1)}
    schedule = made({0: first + back[0], 1: second + back[1]}, ((0,), (1,), (0,), (1,)), 7)
    assert not check(schedule, sends="windowed")
    for unanswered, passes in (((), True), ((0,), False), ((2,), True)):
        assert (not stops_at(schedule, unanswered=unanswered)) is passes
        assert gets_to_its_end(processes_of(schedule, unanswered=unanswered)) is passes
    with pytest.raises(DeadlockError, match=r"at most 3 gradients, or activations without a gradient,"):
        require_valid(schedule, sends="windowed", unanswered=(0,))


def test_a_deadlock_is_one_state_whatever_comes_first() -> None:
    schedule, bounds = known_deadlock(3), ChannelBounds(ahead=1, window=0)
    assert stops_at(schedule, bounds=bounds)
    processes = processes_of(schedule, bounds=bounds)
    ends, states = reachable_ends(processes)
    assert len(ends) == 1
    assert states > 100
    assert ends != {tuple(len(process.steps) for process in processes)}
