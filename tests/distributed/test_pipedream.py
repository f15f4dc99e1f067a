"""PipeDream's runs are its stale updates, one by one, and it holds as many versions of the weights as it says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from forked_ranks import read_results, start
from pipedream_cases import PipeDreamCase, write_cases

from bapipe.records.plan import read_plan
from bapipe.records.run_record import read_run
from bapipe.schedule.generators import pipedream
from command import bapipe

HERE = Path(__file__).resolve().parent
CASES = (
    PipeDreamCase(model="gnmt", stages=2, microbatches=4, optimizer="momentum"),
    PipeDreamCase(model="vgg", numbers="dropout", stages=3, microbatches=4, optimizer="adam", short=True),
    PipeDreamCase(model="unet", stages=3, microbatches=5, optimizer="momentum", short=True),
    PipeDreamCase(model="unet", stages=4, microbatches=2, optimizer="adam"),
    PipeDreamCase(model="resnet", stages=4, microbatches=3, optimizer="momentum"),
    PipeDreamCase(model="vgg", numbers="dropout", stages=4, microbatches=4, optimizer="adam", vertical_sync=True),
    PipeDreamCase(model="resnet", stages=2, microbatches=3, optimizer="adam", vertical_sync=True),
    PipeDreamCase(model="unet", stages=3, microbatches=1, optimizer="momentum", vertical_sync=True),
    PipeDreamCase(
        model="vgg", numbers="dropout", stages=2, microbatches=3, optimizer="momentum", split="classifier.0"
    ),
)
TIED = PipeDreamCase(model="whole", stages=4, microbatches=2, optimizer="momentum")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pipedream")
    write_cases((*CASES, TIED), folder / "cases.json")
    start(HERE / "pipedream_worker.py", folder, seconds=1500)
    cases = (*CASES, TIED)
    ranks = read_results(folder, [case.stages for case in cases])
    found = {case.name: items for case, items in zip(cases, ranks, strict=True)}
    errors = {name: item["error"] for name, items in found.items() for item in items if item and "error" in item}
    assert errors.keys() == {TIED.name}, errors
    return {name: items[0] for name, items in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_update_is_that_of_one_process(results: dict[str, dict[str, Any]], case: PipeDreamCase) -> None:
    found = results[case.name]
    assert found["updates"] == case.steps * case.microbatches
    for gradient, loss, where in found["differences"]:
        assert gradient <= 1e-12, where
        assert loss <= 1e-12
    assert found["weights"] <= 1e-12
    assert found["moved"] > 0
    assert all(found["losses"]), "ranks are told different losses"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_versions_are_as_many_as_are_needed(results: dict[str, dict[str, Any]], case: PipeDreamCase) -> None:
    found = results[case.name]
    N = case.stages
    halves = (case.steps // 2, case.steps - case.steps // 2)
    for stage in range(N):
        most = N if case.vertical_sync else N - stage
        expected = [min(most, half * case.microbatches) for half in halves]
        assert found["versions"][stage] == [max(expected[: index + 1]) for index in range(2)]
        assert found["counted"][stage] == max(expected), "memories that hold a version of the largest weight"
        assert found["live"][stage] == [min(N - stage, half * case.microbatches) for half in halves]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_order_is_the_simulated_one_without_a_pause(
    results: dict[str, dict[str, Any]], case: PipeDreamCase
) -> None:
    """Endless 1F1B over all global batches: steps follow one another without draining."""
    count = case.steps // 2 * case.microbatches
    endless = pipedream(case.stages, count)
    for stage, lane in enumerate(endless.lanes):
        labels = [
            (
                action.microbatch // case.microbatches,
                f"{stage}{action.kind.name}{action.microbatch % case.microbatches}",
            )
            for action in lane
            if action.microbatch is not None
        ]
        by_step = [label for step in range(case.steps // 2) for at, label in labels if at == step]
        assert results[case.name]["order"][stage] == by_step


def test_tied_weights_are_refused(results: dict[str, dict[str, Any]]) -> None:
    assert "PipeDream updates every stage by itself" in results[TIED.name]["error"]


def test_plan_run_and_compare(tmp_path: Path) -> None:
    """From the command line, checked against one process; the record says how many versions there were."""
    folder, program = HERE.parents[1], Path(sys.executable).with_name("bapipe")
    plan, run = tmp_path / "plan.json", tmp_path / "run.json"
    what = ("examples/tiny-profile.json", "--cluster", "examples/cluster-two-cpus.toml", "--global-batch", "32")
    how = ("--schedule", "pipedream", "--strategy", "pipedream", "--out", str(plan))
    assert bapipe("plan", *what, *how, folder=folder).returncode == 0
    trained = subprocess.run(
        [str(program), "run", str(plan), "--steps", "3", "--check", "--out", str(run)],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    compared = bapipe("compare", str(plan), str(run), "--json")
    assert compared.returncode == 0, compared.stderr
    record = read_run(run)
    assert record.weight_versions == (2, 1)
    assert record.peak_in_flight == (2, 1)
    assert record.transfers is None
    assert record.check is not None
    assert record.check.passed
    assert len(record.steps) == 3
    found = json.loads(compared.stdout)
    step = record.steps[record.recorded_step]
    assert math.isclose(found["time"]["measured"], step.seconds, rel_tol=1e-6)
    assert math.isclose(found["time"]["predicted"], read_plan(plan).prediction.time, rel_tol=1e-6)
