"""At 80 columns every figure of a plan can be read, whatever the names are; and names are never markup."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import RenderableType

from bapipe.analysis.predicted_measured import compare
from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.reporting.terminal.compare_table import comparison_notes, comparison_tables
from bapipe.reporting.terminal.console import terminal
from bapipe.reporting.terminal.plan_table import render_plan
from bapipe.units import format_bytes, format_seconds
from command import bapipe
from made_runs import made_run
from paths import REPOSITORY
from report_plans import planned

MARKUP = "[/bold] [red]:smile:"


def shown(*parts: RenderableType, width: int = 80) -> str:
    """What a terminal of so many columns shows."""
    console = terminal()
    console.file, console.width = io.StringIO(), width
    for part in parts:
        console.print(part)
    text: str = console.file.getvalue()
    return text


def deep(stages: int, cluster: str) -> Plan:
    hardware = read_cluster(cluster)
    profile = load_profile("gpt2-medium", types=list(hardware.types.values()), microbatches=[1])
    request = Request(global_batch=2 * stages, microbatch=1, stages=stages, schedule="1f1b-so")
    return make_plan(explore(profile, hardware, request))


def with_long_names(plan: Plan) -> Plan:
    """The same plan on nodes and of layers whose names are longer than any column, and times of two units."""
    names = {item.name: f"gpu-node-eu-west-{item.name}" for item in plan.cluster.accelerators}
    accelerators = tuple(replace(item, name=names[item.name]) for item in plan.cluster.accelerators)
    stages = tuple(
        replace(
            stage,
            accelerators=tuple(names[name] for name in stage.accelerators),
            layers=tuple(f"transformer.encoder.blocks.{name}.attention.projection" for name in stage.layers),
            forward=9.87e-4,
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, cluster=replace(plan.cluster, accelerators=accelerators))


PLANS = {
    "8 stages": lambda: deep(8, "8xv100"),
    "16 stages": lambda: deep(16, "16xv100"),
    "16 mixed stages": lambda: deep(16, "8xv100+8xa100"),
    "long names": lambda: with_long_names(deep(16, "8xv100+8xa100")),
    "replicas": lambda: planned("hybrid")[0],
    "recompute": lambda: planned("recompute")[0],
}


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", list(PLANS))
def test_no_figure_of_the_stages_is_cut(name: str, width: int) -> None:
    plan = PLANS[name]()
    text = shown(render_plan(plan), width=width).partition("why not the others")[0]
    assert max(map(cell_len, text.splitlines())) <= width
    rows = [line for line in text.splitlines() if re.match(r" +\d+ +\S", line)]
    assert len(rows) == len(plan.stages)
    for number, (stage, row) in enumerate(zip(plan.stages, rows, strict=True)):
        backward = format_seconds(stage.backward)
        assert f"+ {backward} " in row
        assert format_bytes(stage.memory_bytes) in row
        assert f" {stage.in_flight:g} " in row
        sends = "–" if number + 1 == len(plan.stages) else format_bytes(stage.send_forward_bytes)
        assert row.rstrip().endswith(f" {sends}")
    # Names wrap; put together again they are whole.
    joined = re.sub(r"\s", "", text)
    if name == "long names":
        for stage in plan.stages:
            assert stage.layers[0][-20:] in joined
            assert stage.layers[-1][-20:] in joined
            assert stage.accelerators[0] in joined or width < 100


def test_ranges_stand_behind_times_and_are_not_cut() -> None:
    plan, _ = planned("straight")
    prediction = replace(plan.prediction, time=0.0847, low=0.0791, high=0.0928)
    alternatives = tuple(
        replace(alternative, time=0.0851, low=0.0795, high=0.0934) for alternative in plan.alternatives[:3]
    )
    text = shown(render_plan(replace(plan, prediction=prediction, alternatives=alternatives)))
    assert "84.7 ms (79–93)" in re.sub(r"\s+", " ", text)
    assert text.count("(80–93)") == len(alternatives)


def test_the_comparison_is_not_cut_either() -> None:
    plan, _ = planned("zero bubble")
    found = compare(plan, made_run(plan, plan_timeline(plan)))
    text = shown(*comparison_tables(found), *comparison_notes(found))
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    for row in found.stages:
        assert format_seconds(row.forward.measured) in text


@pytest.mark.parametrize(
    "command",
    [
        "plan alexnet --cluster 2xvcu118 --global-batch 16 --explain",
        "plan alexnet --cluster 2xvcu118 --global-batch 16 --compare",
        "plan alexnet --cluster 2xv100 --global-batch 16 --compare",
        "plan alexnet --cluster 2xv100 --global-batch 16 --layer-error 5% --link-error 30%",
        "simulate all -n 8 -m 32 --forward 10.125 --backward 20.375 --transfer 5.25",
        "what-if alexnet --cluster 2xv100 --sweep link=1..20GB/s --points 2 --global-batch 64",
        "reproduce table1",
    ],
)
def test_tables_of_commands_fit(command: str, tmp_path: Path) -> None:
    done = bapipe(*command.split(), folder=tmp_path, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if set(line) & set("│┃"):
            assert cell_len(line) <= 80
            assert not re.search(r"\w…", line), line


def test_a_name_is_no_markup() -> None:
    plan, _ = planned("straight")
    named = replace(
        plan,
        model=replace(plan.model, name=MARKUP),
        stages=tuple(replace(stage, layers=(MARKUP,) * len(stage.layers)) for stage in plan.stages),
        alternatives=tuple(replace(way, name=MARKUP, reason=MARKUP) for way in plan.alternatives),
        notes=(MARKUP,),
    )
    text = shown(render_plan(named), width=140)
    assert text.count(MARKUP) >= 2 + 2 * min(8, len(plan.alternatives)) + len(plan.stages)


def test_the_commands_print_names_as_they_are(tmp_path: Path) -> None:
    """Through the command, with a file and a layer of that name."""
    text = (REPOSITORY / "examples" / "tiny-profile.json").read_text(encoding="utf-8")
    (tmp_path / "profile.json").write_text(text.replace('"layer0"', '"[/bold]"'), encoding="utf-8")
    cluster = str(REPOSITORY / "examples" / "cluster-two-cpus.toml")
    options = ("--cluster", cluster, "--global-batch", "64", "--schedule", "1f1b-sno")
    done = bapipe("plan", "profile.json", *options, "--out", "[red].json", folder=tmp_path, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "[/bold] …" in done.stdout
    assert "wrote [red].json" in done.stdout


def test_there_is_one_console() -> None:
    """Any other would read names as markup."""
    for path in (REPOSITORY / "src" / "bapipe").rglob("*.py"):
        if path.name != "console.py":
            assert not re.search(r"\bConsole\(", path.read_text(encoding="utf-8")), path
