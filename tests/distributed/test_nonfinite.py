"""A loss or gradient that is not finite is reported once, with step, rank, stage and layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from forked_ranks import read_results, start
from nonfinite_cases import CASES, NAMES

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of every case what each rank has to say."""
    folder = tmp_path_factory.mktemp("nonfinite")
    start(HERE / "nonfinite_worker.py", folder, seconds=240)
    return dict(zip(NAMES, read_results(folder, [2] * len(CASES)), strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("log", "pipedream", "diverging")])
def test_what_is_not_finite_is_told_once_on_every_rank(results: dict[str, list[Any]], name: str) -> None:
    first, second = results[name]
    assert first.get("error") is None, first["error"]
    assert first["found"] == second["found"]
    told = CASES[NAMES.index(name)]["told"]
    if told is None:
        assert first["lines"] == []
        return
    [found] = first["found"]
    step, what, rank, stage, layer = told
    assert (found["step"], found["what"], found["rank"], found["stage"]) == (step, what, rank, stage)
    assert (found["layer"] or "").split(".")[0] == (layer or "")
    assert found["value"] in ("nan", "inf", "-inf")
    [line] = first["lines"]
    assert "\n" not in line
    assert line.startswith(f"step {step}: the ")
    assert rank is None or f"of layer '{found['layer']}' on rank {rank}, stage {stage}" in line


def test_an_output_is_told_with_the_place_in_the_code(results: dict[str, list[Any]]) -> None:
    [found] = results["output on the first stage"][0]["found"]
    file, line = found["place"].rsplit(":", 1)
    assert "self.linear(masked) / self.scale" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_look_leaves_running_statistics_as_they_are(results: dict[str, list[Any]]) -> None:
    """Each global batch counts once, also the one whose forward was run again."""
    looked, untouched = results["output on the last stage"], results["scaled gradient"]
    assert [rank["batches"] for rank in looked] == [rank["batches"] for rank in untouched] == [[8], [8]]


def test_a_pipedream_tells_it_on_the_last_rank_without_a_wait(results: dict[str, list[Any]]) -> None:
    first, last = results["pipedream"]
    assert first == {"found": [], "lines": []}
    [found] = last["found"]
    step, what, rank, stage, layer = CASES[NAMES.index("pipedream")]["told"]
    assert (found["step"], found["what"], found["rank"], found["stage"]) == (step, what, rank, stage)
    assert found["layer"].split(".")[0] == layer


def test_by_default_rank_0_logs_one_line(results: dict[str, list[Any]]) -> None:
    first, second = results["log"]
    [line] = first["lines"]
    assert line.startswith("step 1: the loss is ")
    assert second["lines"] == []


def test_gradients_that_become_large_are_told_with_their_layer(
    results: dict[str, list[Any]],
) -> None:
    first, second = results["diverging"]
    assert first.get("error") is None, first["error"]
    assert first == second
    [found] = first["found"]
    assert (found["step"], found["rank"], found["stage"]) == (39, 1, 1)
    assert found["norm"] > 1000 * found["usual"] > 0
    assert found["layer"].split(".")[0] == "3"
    assert 0.1 < found["share"] <= 1
    [line] = first["lines"]
    assert line.startswith("step 39: the gradients diverge: their norm is ")
