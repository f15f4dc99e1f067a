"""Losses that are means over tokens have the gradients of the whole global batch in one process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")
pytest.importorskip("transformers", reason="GPT-2 and T5 are those of transformers")

from forked_ranks import read_results, start
from run_plans import make_plan
from token_mean_cases import CASES, FULL, TokenCase

from bapipe.models.layers import ModelRef
from bapipe.records.plan import write_plan

HERE = Path(__file__).resolve().parent
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
Results = dict[str, list[dict[str, Any]]]


def _train(cases: tuple[TokenCase, ...], folder: Path, *, seconds: float) -> Results:
    start(HERE / "token_mean_worker.py", folder, *(["full"] if cases is FULL else []), seconds=seconds)
    ranks = read_results(folder, [case.ranks for case in cases])
    return {case.name: found for case, found in zip(cases, ranks, strict=True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(CASES, tmp_path_factory.mktemp("tokens"), seconds=900)


@pytest.fixture(scope="module")
def trained_in_full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _train(FULL, tmp_path_factory.mktemp("tokens-full"), seconds=3600)


def _check(case: TokenCase, ranks: list[dict[str, Any]]) -> None:
    allowed = TOLERANCES[case.numbers]
    for rank, found in enumerate(ranks):
        assert "error" not in found, f"rank {rank}: {found.get('error')}"
        assert found["warnings"] == []
        assert found["difference"] <= allowed
        pairs = [*found["losses"], *found["evaluated"], found["norms"]]
        assert all(math.isclose(*pair, rel_tol=allowed) for pair in pairs), pairs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_the_whole_global_batch(case: TokenCase, trained: Results) -> None:
    """Two steps whose gradients add up, and what evaluation says; one micro-batch has no label at all."""
    _check(case, trained[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_under_every_schedule(case: TokenCase, trained_in_full: Results) -> None:
    _check(case, trained_in_full[case.name])


def test_pipedream_learns_nothing_from_a_micro_batch_without_labels(trained: Results) -> None:
    for case in CASES:
        if case.schedule == "pipedream":
            for found in trained[case.name]:
                assert found["each"][1] == 0.0
                assert found["finite"]


def test_a_run_warns_once_and_its_check_sees_what_is_wrong(tmp_path: Path) -> None:
    """A loss that cannot be recognised, by the command line: the remedy on one line, and exit code 1."""
    model = ModelRef(name="padded", ref="padded_model:build")
    plan = make_plan("1f1b-so", microbatch_size=2, model=model, layers=("0", "1", "3"), dtype="fp64")
    write_plan(plan, tmp_path / "plan.json")
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "bapipe", "run", str(tmp_path / "plan.json"), "--steps", "2", "--check"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("it is not known over what the loss is a mean") == 1
    assert done.stderr.count("wrap it in bapipe.torch.token_mean") == 1
    assert "gradients differ from one process on the whole global batch by at most" in done.stderr
