"""What torch's DDP and FSDP2 hold and when, counted on two ranks, beside what is planned."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from engine_memory_worker import BLOCKS, CASES, HEADS, ROWS, WIDTH, WORLD, Case
from forked_ranks import read_results, start

from bapipe.costs.profile import Profile
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import read_plan, write_plan
from made_profiles import made_cluster, made_profile
from warm_python import USUAL_START

HERE = Path(__file__).resolve().parent
WEIGHTS = [4.0 * WIDTH * WIDTH] * (1 + BLOCKS) + [4.0 * WIDTH * HEADS]
VALUE, OUTPUT = 4.0 * WIDTH, 4.0 * HEADS
"""bytes of a row between layers, and after the last"""


def profile() -> Profile:
    """Each layer keeps what it takes, the last also what it gives; its backward makes its weights' gradient."""
    count = len(WEIGHTS)
    made = made_profile(
        {"x": [1e-3] * count},
        weights=WEIGHTS,
        saved_activations=[VALUE] * (count - 1) + [VALUE + 2 * OUTPUT],
        boundary=[VALUE] * count,
        sizes=(ROWS,),
    )
    modules = [("entry",), *((f"blocks.{index}.inner",) for index in range(BLOCKS)), ("head",)]
    layers = tuple(replace(layer, modules=own) for layer, own in zip(made.layers, modules, strict=True))
    table = made.accelerators["x"]
    forward = [ROWS * VALUE] * (count - 1) + [ROWS * OUTPUT]
    backward = [own + 2 * more for own, more in zip(WEIGHTS, forward, strict=True)]
    more = tuple(map(max, forward, backward))
    table = replace(
        table,
        layer_workspace=(more,),
        forward_workspace=(tuple(forward),),
        backward_workspace=(tuple(backward),),
    )
    return replace(made, layers=layers, accelerators={"x": table})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("engine_memory")
    cluster = made_cluster({"x": WORLD}, bandwidth=1e9, memory=1e9)
    cluster = replace(cluster, types={"x": replace(cluster.types["x"], kind="cpu")})
    for case in CASES:
        asked = Request(
            global_batch=WORLD * ROWS * case.microbatches,
            microbatch=ROWS,
            optimizer=case.optimizer,
            strategy=case.engine,  # type: ignore[arg-type]
        )
        write_plan(make_plan(explore(profile(), cluster, asked)), found / f"{case.name}.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", USUAL_START)  # ranks as a user has them
        start(HERE / "engine_memory_worker.py", found, seconds=300)
    return found


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = read_results(folder, [WORLD] * len(CASES))
    for rank in (rank for ranks in found for rank in ranks):
        assert "error" not in rank, rank["error"]
    return dict(zip([case.name for case in CASES], found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rank_holds_what_is_planned(folder: Path, results: dict[str, list[dict[str, Any]]], case: Case) -> None:
    planned = read_plan(folder / f"{case.name}.json").stages[0].memory_bytes
    for rank in results[case.name]:
        assert rank["most"] == pytest.approx(planned, rel=0.02)


def test_ddp_has_its_gradients_once(results: dict[str, list[dict[str, Any]]]) -> None:
    weights = sum(WEIGHTS)
    for count in (1, 3):
        # Weights, gradients, and the gradient that a layer is about to add to the largest.
        assert results[f"ddp-{count}-sgd"][0]["most"] == pytest.approx(2 * weights + max(WEIGHTS), rel=0.02)
        assert results[f"ddp-{count}-adam"][0]["most"] == pytest.approx(4 * weights + max(WEIGHTS), rel=0.02)


@pytest.mark.parametrize("count", [1, 3])
def test_fsdp_gathers_frees_and_scatters_in_this_order(
    results: dict[str, list[dict[str, Any]]], count: int
) -> None:
    """As `bapipe.planner.fsdp_events` draws it, in every micro-batch."""
    names = [f"blocks.{index}" for index in range(BLOCKS)]
    forward = [event for name in names for event in (f"gather {name}", f"free {name}")]
    backward = [f"gather {names[-1]}"]
    for index in range(BLOCKS - 1, -1, -1):
        backward += [f"gather {names[index - 1]}"] if index else []
        backward += [f"free {names[index]}", f"scatter {names[index]}"]
    for rank in results[f"fsdp-{count}-sgd"]:
        assert rank["events"] == ["gather root", *forward, *backward, "free root", "scatter root"]
