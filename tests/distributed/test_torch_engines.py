"""ZeRO-1 and torch's DDP and FSDP2 train the same from plans of the same profile, as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from bapipe.costs.profile import read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.run_record import RunRecord, read_run
from bapipe.torch.checkpoint.checkpoint_options import Saving
from bapipe.torch.launch.launcher import check_run, launch
from bapipe.torch.launch.run_options import RunOptions
from paths import REPOSITORY

STEPS = 3
WAYS = {
    "dp": {"strategy": "dp", "zero_stage": "0"},
    "zero": {"strategy": "dp", "zero_stage": "1"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
}


def planned(folder: Path, way: str) -> Path:
    profile = json.loads((REPOSITORY / "examples" / "tiny-profile.json").read_text(encoding="utf-8"))
    for index, layer in enumerate(profile["layers"]):
        layer["modules"] = ["head"] if layer["name"] == "head" else [f"layer{index}.0"]
    path = folder / "profile.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    request = Request(global_batch=32, microbatch=8, optimizer="adamw", **WAYS[way])  # type: ignore[arg-type]
    cluster = read_cluster(str(REPOSITORY / "examples" / "cluster-two-cpus.toml"))
    plan = make_plan(explore(read_profile(path), cluster, request))
    write_plan(plan, folder / f"{way}.json")
    return folder / f"{way}.json"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    folder = tmp_path_factory.mktemp("engines")
    found = {}
    for way in WAYS:
        plan, out = planned(folder, way), folder / f"{way}-run.json"
        options = RunOptions(steps=STEPS, check=True, out=out, learning_rate=1e-3, timeout=120)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(REPOSITORY)  # where the model's code is
            assert launch(plan, options) == 0, way
        found[way] = read_run(out)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(runs: dict[str, RunRecord], way: str) -> None:
    check = runs[way].check
    assert check is not None
    assert check.passed
    assert check.steps == STEPS
    assert len(runs[way].peak_memory) == 2


def test_all_have_the_same_losses(runs: dict[str, RunRecord]) -> None:
    losses = {way: [step.loss for step in run.steps] for way, run in runs.items()}
    assert losses["zero"] == losses["dp"]  # to the last bit: a sum of two has no order
    for way in ("ddp", "fsdp"):
        assert losses[way] == pytest.approx(losses["dp"], rel=1e-5)


def test_the_plan_names_engine_units_and_stage(tmp_path: Path) -> None:
    plans = {way: read_plan(planned(tmp_path, way)) for way in WAYS}
    assert [plan.engine for plan in plans.values()] == ["bapipe", "bapipe", "ddp", "fsdp"]
    assert [plan.zero_stage for plan in plans.values()] == [0, 1, 0, 0]
    assert plans["fsdp"].units == tuple(f"layer{index}.0" for index in range(7))  # the head is in no list
    assert plans["zero"].stages[0].memory_bytes < plans["dp"].stages[0].memory_bytes
    assert plans["fsdp"].stages[0].memory_bytes < plans["ddp"].stages[0].memory_bytes


def test_what_torch_does_not_do_is_refused(tmp_path: Path) -> None:
    path = planned(tmp_path, "fsdp")
    with pytest.raises(BaPipeError, match="a run of fsdp is not saved; leave --checkpoint out"):
        check_run(path, RunOptions(saving=Saving(folder=tmp_path / "saved")))
    data = json.loads(path.read_text(encoding="utf-8"))
    for change, words in (
        ({"dtype": "fp16-mixed"}, "runs no fp16-mixed here"),
        ({"compiled": True}, "runs layers as they are"),
        ({"optimizer": "torch.optim:Muon"}, "looks at more than one element"),
        ({"zero_stage": 1}, "runs the whole model on every rank"),
    ):
        path.write_text(json.dumps({**data, **change}), encoding="utf-8")
        with pytest.raises(BaPipeError, match=words):
            check_run(path, RunOptions())
