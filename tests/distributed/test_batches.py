"""Short batches, accumulated gradients, loaders of one rank and evaluation outputs equal one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")
pytest.importorskip("transformers", reason="GPT-2 is that of transformers")

from batch_cases import BATCH_CASES, BatchCase
from forked_ranks import read_results, start

HERE = Path(__file__).resolve().parent
ALLOWED = 1e-12
Results = dict[str, list[dict[str, Any]]]

each_case = pytest.mark.parametrize(
    "case", [case for case in BATCH_CASES if not case.lengths], ids=lambda case: case.name
)
each_mix = pytest.mark.parametrize(
    "case", [case for case in BATCH_CASES if case.lengths], ids=lambda case: case.name
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("batches")
    start(HERE / "batch_worker.py", folder, seconds=900)
    ranks = read_results(folder, [case.ranks for case in BATCH_CASES])
    return {case.name: found for case, found in zip(BATCH_CASES, ranks, strict=True)}


def _found(case: BatchCase, results: Results, what: str) -> list[dict[str, Any]]:
    for rank, found in enumerate(results[case.name]):
        assert "error" not in found, f"rank {rank}: {found.get('error')}"
    return [found[what] for found in results[case.name]]


def _equal(found: dict[str, Any]) -> None:
    assert max(found["differences"]) <= ALLOWED
    assert all(math.isclose(*pair, rel_tol=ALLOWED) for pair in found["losses"]), found["losses"]


@each_case
def test_short_batches_have_the_gradients_of_one_process(case: BatchCase, results: Results) -> None:
    for found in _found(case, results, "short"):
        _equal(found)


@each_case
def test_evaluation_returns_what_the_model_returns_for_the_whole_batch(case: BatchCase, results: Results) -> None:
    ranks = _found(case, results, "outputs")
    for found in ranks:
        assert max(found["gaps"]) <= ALLOWED
        assert all(found["places"])
    assert sum(found["streamed"] for found in ranks if found["is_last"]) == 2  # of four samples in twos


@each_case
def test_a_loader_yields_the_batches_of_one_process(case: BatchCase, results: Results) -> None:
    for found in _found(case, results, "loader"):
        _equal(found)
        assert found["samples"] == [8, 8, 3] * 2
        assert found["positions"] == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]


@each_mix
def test_sequences_of_several_lengths_have_the_gradients_of_one_process(case: BatchCase, results: Results) -> None:
    for found in _found(case, results, "buckets"):
        _equal(found)


@each_mix
def test_a_loader_makes_batches_of_one_bucket_each(case: BatchCase, results: Results) -> None:
    for found in _found(case, results, "mixed"):
        _equal(found)
        assert found["samples"] == 22
        assert found["lengths"] == sorted((6, *case.lengths))


def test_replicas_load_only_their_micro_batches(results: Results) -> None:
    """In 19 samples the ten micro-batches are 2, the last one 1; two replicas of a stage take them in turn."""
    expected = {
        "words-1f1b-so": [19, 19],
        "words-data-parallel": [10, 9],
        "words-1f1b-so-r1.2": [19, 10, 9],
        "words-1f1b-so-r2.1": [10, 9, 19],
    }
    for name, wanted in expected.items():
        assert [found["loader"]["loaded"] for found in results[name]] == wanted


@each_case
def test_ranks_that_load_the_same_micro_batch_draw_the_same(case: BatchCase, results: Results) -> None:
    drawn: dict[str, list[list[Any]]] = {}
    for found in _found(case, results, "draws"):
        for key, parts in found.items():
            drawn.setdefault(key, []).append(parts)
    assert sorted(drawn) == [f"{batch}.{number}" for batch in range(2) for number in range(4)]
    for parts in drawn.values():
        noises = {sample[-1] for part in parts for side in part if side is not None for sample in flat(side)}
        assert len(noises) == 1


def flat(side: Any) -> list[list[float]]:
    return side if isinstance(side[0][0], float) else side[0]
