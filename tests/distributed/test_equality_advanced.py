"""Replicas, zero-bubble orders, interleaving and layers split between stages train as one process does.

Losses, every gradient, running statistics, and the norm of all gradients; and what is live is what is simulated.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from advanced_cases import FULL, QUICK, AdvancedCase, make_advanced_plan, schedule_of, write_advanced_cases
from forked_ranks import read_results, start

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Kind
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline, Transfers
from bapipe.torch.capturing import capture
from bapipe.torch.runtime.plan_checks import check_plan
from split_models import build_split_model

HERE = Path(__file__).resolve().parent
Results = dict[str, list[dict[str, Any]]]
"""case -> what each of its ranks found"""


def _train(cases: tuple[AdvancedCase, ...], folder: Path, *, seconds: float) -> Results:
    write_advanced_cases(cases, folder / "cases.json")
    start(HERE / "advanced_worker.py", folder, seconds=seconds)
    ranks = read_results(folder, [schedule_of(case).num_ranks for case in cases])
    return {case.name: found for case, found in zip(cases, ranks, strict=True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(QUICK, tmp_path_factory.mktemp("advanced"), seconds=1500)


@pytest.fixture(scope="module")
def trained_in_full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(FULL, tmp_path_factory.mktemp("advanced-full"), seconds=7200)


def _check(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert "error" not in found, f"rank {rank}: {found.get('error')}"
    hashes: dict[str, set[str]] = {}
    for found in ranks:
        assert found["worst"][0] <= 1e-12, found["worst"]
        assert found["left"] == 0, "graphs outlive the step"
        for loss, expected in found["losses"]:
            assert math.isclose(loss, expected, rel_tol=1e-12)
        for norm, expected in found["norms"]:
            assert math.isclose(norm, expected, rel_tol=1e-10)
        assert found["evaluated"] == ranks[0]["evaluated"]
        for key, value in found["hashes"].items():
            hashes.setdefault(key, set()).add(value)
    assert all(len(values) == 1 for values in hashes.values()), "holders of one weight have different gradients"
    _check_parts(ranks)


def _check_parts(ranks: list[dict[str, Any]]) -> None:
    """Every weight is somewhere, whole or in parts without a gap."""
    for name in ranks[0]["names"]:
        held = {
            None if part is None else tuple(part)
            for found in ranks
            for key, part in found["held"].items()
            if key == name
        }
        if held == {None}:
            continue
        assert None not in held
        parts = sorted(part for part in held if part is not None)
        assert [start for start, _, _ in parts] == [0, *(start + size for start, size, _ in parts)][:-1]
        assert sum(size for _, size, _ in parts) == parts[0][2]


def _of_rank(timeline: Timeline, rank: int) -> Timeline:
    own = timeline.ranks == rank
    columns = ("kinds", "stages", "microbatches", "ranks", "lanes", "start", "end", "work")
    return dataclasses.replace(
        timeline, transfers=Transfers.none(), **{name: getattr(timeline, name)[own] for name in columns}
    )


def _check_live(case: AdvancedCase, ranks: list[dict[str, Any]]) -> None:
    schedule = schedule_of(case)
    N = schedule.num_stages
    costs = Costs(
        forward=(1.0,) * N,
        backward=(2.0,) * N,
        send_forward=(0.1,) * (N - 1),
        send_backward=(0.1,) * (N - 1),
        input_gradient=(1.0,) * N,
        weight_gradient=(1.0,) * N,
        recompute=(1.0,) * N,
        all_reduce=(0.1,) * N,
        update=(0.1,) * N,
    )
    timeline = simulate(schedule, costs)
    for rank, found in enumerate(ranks):
        predicted = _of_rank(timeline, rank).peak_in_flight()
        for stage in schedule.stages_of(rank):
            assert [step[str(stage)] for step in found["live"]] == [predicted[stage]] * len(found["live"])
            again = bool(((timeline.kinds == Kind.R) & (timeline.stages == stage)).any())
            if stage in schedule.parted_stages():
                # The node that is watched lies above all weights, so weight gradients that wait may not hold it.
                assert found["graphs"][str(stage)] <= predicted[stage], "graphs alive at once"
            elif not again:
                assert found["graphs"][str(stage)] == predicted[stage], "graphs alive at once"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_training_is_that_of_one_process(trained: Results, case: AdvancedCase) -> None:
    _check(trained[case.name])


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_what_is_live_is_what_is_simulated(trained: Results, case: AdvancedCase) -> None:
    _check_live(case, trained[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_every_cut_under_every_schedule(trained_in_full: Results, case: AdvancedCase) -> None:
    _check(trained_in_full[case.name])
    _check_live(case, trained_in_full[case.name])


def test_cases_are_told_apart() -> None:
    assert len({case.name for case in QUICK}) == len(QUICK)
    assert len({case.name for case in FULL}) == len(FULL)


def test_two_parts_of_a_layer_on_one_rank_are_refused() -> None:
    """They would go by one name, and an optimizer would see one of them only."""
    module, args, kwargs = build_split_model("words")
    case = AdvancedCase(
        model="words",
        schedule="interleaved",
        microbatches=4,
        cuts=(("between", 0), ("classifier", 1), ("classifier", 28)),
    )
    plan = make_advanced_plan(case, capture(module, args, kwargs, check=False))
    with pytest.raises(BaPipeError, match="stages 1 and 3 are both on localhost/1 and both have a part of layer"):
        check_plan(plan)
