"""Plans and runs whose parts contradict each other are refused when they are read, in one line with a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapipe.costs.profile import read_profile
from bapipe.errors import FileFormatError
from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request
from bapipe.planner.inputs import layers_for_fpgas
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.run_record import read_run
from command import bapipe, refused
from paths import REPOSITORY
from report_plans import SHAPES, planned

EXAMPLES = REPOSITORY / "examples"
Change = Callable[[Any], Any]


def changed(name: str, change: Change, folder: Path) -> Path:
    values = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    change(values)
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder / name


def put(*path: Any) -> Change:
    """Set the value at a place: put("stages", 0, "forward", -1)."""

    def change(values: Any) -> None:
        *most, key, value = path
        for step in most:
            values = values[step]
        values[key] = value

    return change


PLANS = {
    "node must be a name without '/' and spaces, got '0 GB/s'": put(
        "cluster", "accelerators", 0, "node", "0 GB/s"
    ),
    "runs on no accelerator": put("stages", 0, "accelerators", []),
    "which is none": put("stages", 0, "accelerators", ["localhost/1"]),
    "never runs": put("schedule", "lanes", []),
    "0 to 99 and 4 names where layer 0 is next": put("stages", 0, "last_layer", 99),
    "forward must be at least 0, got -1": put("stages", 0, "forward", -1),
    "expected a number of at most 1e+30; got 1e+308": put("stages", 1, "backward", 1e308),
    "cannot hold a global batch of 1000": put("global_batch", 1000),
    "0 micro-batches": put("microbatches", 0),
    "unknown precision 'fp12'": put("dtype", "fp12"),
    "stage 0 recomputes, but its order has no R": put("stages", 0, "recompute", True),
    "which does not go on from the stage before": put(
        "stages", 0, "fractions", [{"layer": 3, "start": 2, "stop": 1, "of": 4}]
    ),
    "no stage has the rest of layer": put(
        "stages", 1, "fractions", [{"layer": 7, "start": 0, "stop": 1, "of": 4}]
    ),
    "has all of layer 3, of which the stage before": lambda values: (
        put("stages", 0, "fractions", [{"layer": 3, "start": 0, "stop": 1, "of": 4}])(values),
        put("stages", 1, "first_layer", 3)(values),
        put("stages", 1, "layers", ["layer3", "layer4", "layer5", "layer6", "head"])(values),
    ),
    "memory must be more than 0, got 0": put("cluster", "types", "cpu-core", "memory", 0),
    "must be a share such as 0.8, got -1": put("cluster", "types", "cpu-core", "efficiency", {"memory": -1}),
    "flops: unknown dtype 'fp31'": put("cluster", "types", "cpu-core", "flops", {"fp31": 1.0}),
    "compute: unknown dtype 'fp31'": put("cluster", "types", "cpu-core", "efficiency", {"compute": {"fp31": 0.5}}),
    "time must be at least 0, got -1": put("prediction", "time", -1),
    "a link joins two accelerators of the cluster, got 'x - localhost/0'": put(
        "cluster", "pairs", {"x - localhost/0": {"bandwidth": 1.0}}
    ),
}


@pytest.mark.parametrize("said", PLANS)
def test_a_plan_that_contradicts_itself_is_refused(said: str, tmp_path: Path) -> None:
    changed("plan.json", PLANS[said], tmp_path)
    with pytest.raises(FileFormatError, match=re.escape(said)) as error:
        read_plan(tmp_path / "plan.json")
    assert str(error.value).startswith(str(tmp_path / "plan.json"))
    assert refused("report", "plan.json", folder=tmp_path).startswith("bapipe: plan.json: ")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("board 'node0/0' has no DSPs; plan again", put("dsp_installed", 0)),
        ("over a link of 0 bytes/s; plan again", put("links", 0, "bandwidth", 0)),
    ],
)
def test_a_board_that_nothing_can_be_built_on_is_refused(said: str, change: Change, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layers = layers_for_fpgas(str(EXAMPLES / "layers-small-cnn.toml"))
    found = explore_fpga(layers, read_cluster("2xvcu118"), Request(global_batch=8, microbatch=1), dtype="fp16")
    write_plan(make_fpga_plan(found), path)
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values["deployment"]["boards"][0])
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(FileFormatError, match=re.escape(said)):
        read_plan(path)


RUNS = {
    "rank 9223372036854775807, and there are ranks 0 to 1": put("transfers", 0, "to_rank", 2**63 - 1),
    "expected a whole number within 64 bits": put("transfers", 0, "to_rank", 2**63),
    "a transfer of 7F7, which is not among the events": put("transfers", 0, "action", "7F7"),
    "an action looks like 2F0": put("events", 0, "action", "[/bold]"),
    "need at least": put("events", 0, "action", "9999F999999"),
    "seconds must be at least 0": put("steps", 0, "seconds", -1.0),
    "a run has 1 to 10000 ranks": put("world_size", 0),
}


@pytest.mark.parametrize("said", RUNS)
def test_a_run_that_contradicts_itself_is_refused(said: str, tmp_path: Path) -> None:
    path = changed("run.json", RUNS[said], tmp_path)
    with pytest.raises(FileFormatError, match=re.escape(said)) as error:
        read_run(path)
    assert str(error.value).startswith(str(path))


PROFILES = {
    "step_overhead must be at least 0, got -1": put("accelerators", "cpu-core", "step_overhead", -1.0),
    "input_bytes must be at least 0, got -1": put("input_bytes", -1.0),
    "shares weights with 'layer9', which is no layer (did you mean 'layer": put(
        "layers", 0, "shares_weights_with", "layer9"
    ),
    "unknown precision 'fp12'": put("dtype", "fp12"),
}


@pytest.mark.parametrize("said", PROFILES)
def test_a_profile_that_contradicts_itself_is_refused(said: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=re.escape(said)):
        read_profile(changed("tiny-profile.json", PROFILES[said], tmp_path))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_planner_writes_is_read_back(shape: str, tmp_path: Path) -> None:
    plan, _ = planned(shape)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("where", ["plan.json", "run.json"])
def test_a_key_that_is_there_twice_is_named(where: str, tmp_path: Path) -> None:
    text = (EXAMPLES / where).read_text(encoding="utf-8")
    (tmp_path / where).write_text(text.replace('"name":', '"name": "other", "name":', 1), encoding="utf-8")
    reader: Callable[[Path], object] = read_plan if where == "plan.json" else read_run
    with pytest.raises(FileFormatError, match="the key 'name' is there twice in one table; keep one of them"):
        reader(tmp_path / where)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    text = (EXAMPLES / "plan.json").read_text(encoding="utf-8")
    (tmp_path / "plan.json").write_text(text.replace('"exact"', '"\\ud800"', 1), encoding="utf-8")
    with pytest.raises(FileFormatError, match="half of a pair of UTF-16 code units"):
        read_plan(tmp_path / "plan.json")


def test_names_that_look_like_markup_and_optimizers_that_cannot_be_told_are_shown(tmp_path: Path) -> None:
    def strange(values: Any) -> None:
        values["model"]["name"] = "[/bold]"
        values["optimizer"] = "adamw"
        values["notes"] = ["[/bold] [red"]

    changed("plan.json", strange, tmp_path)
    assert bapipe("report", "plan.json", folder=tmp_path).returncode == 0
