"""Splits by hand: what they mean for a model's layers, and how they compare with the best plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapipe import make_schedule, write_schedule
from bapipe.analysis.hand_split import read_split
from bapipe.errors import BaPipeError
from bapipe.exporters.export_plan import export_plan
from bapipe.exporters.module_stages import block_stages
from bapipe.records.plan import write_plan
from command import bapipe, refused
from exported_plans import table_plan

LAYERS = ["embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp", "norm", "head"]


def test_layouts_counts_and_files_mean_the_same(tmp_path: Path) -> None:
    firsts = (3, 5)
    assert read_split("Et|t|tL", LAYERS).firsts == firsts
    assert read_split("1,1,1", LAYERS).firsts == firsts
    assert read_split("3,2,4", LAYERS).firsts == firsts  # layers
    file = tmp_path / "layout.args"
    file.write_text("# made by hand\n--pipeline-model-parallel-size 3\n--pipeline-model-parallel-layout Et|t|tL\n")
    found = read_split(str(file), LAYERS)
    assert (found.firsts, found.ranks) == (firsts, 3)
    file.write_text("# made by hand\nEt|t|\ntL\n")
    assert read_split(str(file), LAYERS).firsts == firsts


def test_embedding_and_head_may_stand_alone() -> None:
    assert read_split("E|t*3|L", LAYERS).firsts == (1, 7)


@pytest.mark.parametrize(
    "text, message",
    [
        ("2,2", "the split has 4 blocks, the model 9 layers and 3 blocks in h"),
        ("Et*3||L", "stage 1 of the split has no layer"),
        ("Et|t", "one L last"),
    ],
)
def test_splits_that_do_not_fit_are_refused(text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        read_split(text, LAYERS)


def test_an_order_needs_cuts(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    write_schedule(make_schedule("gpipe", 3, 4), path)
    found = read_split(str(path), LAYERS, cuts="1,1,1")
    assert found.order is not None
    assert (found.order.num_microbatches, found.firsts) == (4, (3, 5))
    with pytest.raises(BaPipeError, match="not where they are cut; give --cuts"):
        read_split(str(path), LAYERS)
    with pytest.raises(BaPipeError, match="has 3 stages, --cuts 2; make them alike"):
        read_split(str(path), LAYERS, cuts="1,2")


COMMON = ("--profile", "gpt2", "--cluster", "3xv100", "--global-batch", "24", "--micro-batch", "2")


def judged(*arguments: str) -> dict:  # type: ignore[type-arg]
    done = bapipe("judge", *arguments, *COMMON, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_exported_layout_is_judged_as_the_plan_was_predicted(tmp_path: Path) -> None:
    """Round trip: plan -> Megatron's layout -> simulated again."""
    plan = table_plan()
    path = tmp_path / "layout.args"
    path.write_text(export_plan(plan, "megatron", out=str(path)).files[str(path)])
    found = judged(str(path))
    assert found["given"]["microbatches"] == plan.microbatches
    first, second, third = (stage.blocks for stage in block_stages(plan)[0])
    assert found["given"]["layers"] == [1 + 2 * first, 2 * second, 2 * third + 2]
    write_plan(plan, tmp_path / "plan.json")
    again = judged(str(tmp_path / "plan.json"))
    assert again["given"]["layers"] == [len(stage.layers) for stage in plan.stages]
    assert again["given"]["time"] == pytest.approx(plan.prediction.time, rel=1e-9)
    assert again["given"]["memory"] == pytest.approx(max(stage.memory_bytes for stage in plan.stages))


def test_a_poor_split_is_longer_and_says_where() -> None:
    even, poor = judged("4,4,4"), judged("10,1,1")
    assert poor["longer"] > even["longer"] >= 0
    assert poor["given"]["bottleneck"] == 0
    assert poor["bottleneck_layers"] == ["embedding", "block-9.mlp"]
    assert poor["best"] == even["best"]


def test_a_csv_order_is_simulated_as_it_stands(tmp_path: Path) -> None:
    for name in ("gpipe", "1f1b-sno"):
        write_schedule(make_schedule(name, 3, 12), tmp_path / f"{name}.csv")
    gpipe = judged(str(tmp_path / "gpipe.csv"), "--cuts", "4,4,4")
    steady = judged(str(tmp_path / "1f1b-sno.csv"), "--cuts", "4,4,4")
    assert steady["given"]["time"] == pytest.approx(judged("4,4,4")["given"]["time"])
    assert gpipe["given"]["memory"] > steady["given"]["memory"]
    write_schedule(make_schedule("gpipe", 3, 5), tmp_path / "odd.csv")
    assert "has 5 micro-batches" in refused("judge", str(tmp_path / "odd.csv"), "--cuts", "4,4,4", *COMMON)


def test_both_timelines_are_shown_and_written(tmp_path: Path) -> None:
    done = bapipe("judge", "4,4,4", *COMMON, "--trace", str(tmp_path / "both.json"), COLUMNS="90")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("given\n") < done.stdout.index("best plan\n") < done.stdout.index("time of a step")
    assert "its slowest stage is 2" in done.stdout
    names = {event["args"]["name"] for event in json.loads((tmp_path / "both.json").read_text())["traceEvents"]
             if event["name"] == "process_name"}  # fmt: skip
    assert {"given", "best plan"} <= {name.split(":")[0] for name in names}
