"""Pipelines in mixed precision have the gradients of one process; an overflow skips a step on all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from forked_ranks import read_results, start
from precision_worker import cases

HERE = Path(__file__).resolve().parent
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("precision")
    start(HERE / "precision_worker.py", folder, seconds=300)
    names = list(cases(folder))
    found = dict(zip(names, read_results(folder, [2] * len(names)), strict=True))
    for name, ranks in found.items():
        for rank, result in enumerate(ranks):
            assert "error" not in result, f"{name}, rank {rank}: {result.get('error')}"
    return found


@pytest.mark.parametrize("name", ["1f1b", "recompute", "zero-bubble", "data-parallel"])
def test_gradients_are_those_of_one_process_under_autocast(name: str, trained: Results) -> None:
    for found in trained[name]:
        assert max(found["differences"]) <= 1e-6
        assert all(math.isclose(*pair, rel_tol=1e-6) for pair in found["losses"])
        assert found["weights"] == ["torch.float32"]
        assert found["evaluated"] > 0
        assert not found["autocast"]
        assert found.get("sent", "torch.bfloat16") == "torch.bfloat16"


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(trained: Results) -> None:
    for found in trained["overflow"]:
        assert "fp16-mixed scales the loss" in found["refused"]
        assert found["skipped"] == [True, True, False, False]
        assert found["changed"] == [False, False, True, True]
        assert found["scales"] == [2.0**35, 2.0**10, 2.0**10, 2.0**11]
        assert found["difference"] <= 1e-6
        before, wanted, after = found["norms"]
        assert math.isclose(before, wanted, rel_tol=1e-5)
        assert math.isclose(after, wanted, rel_tol=1e-5)


def test_master_weights_go_on_from_a_checkpoint(trained: Results) -> None:
    for found in trained["masters"]:
        assert found == {"same": True, "dtypes": ["torch.float32"]}


@pytest.mark.parametrize("name", ["run mixed", "run fp16", "run masters"])
def test_a_run_checks_itself_in_its_own_precision(name: str, trained: Results) -> None:
    found, other = trained[name]
    assert other == {}
    assert found["passed"]
    assert found["compared"] == "microbatches"
    assert found["tolerance"] == 1e-2
    assert found["difference"] <= 1e-5
    assert found["steps"] == 1
