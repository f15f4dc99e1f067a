"""FPGA clusters and what-if from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bapipe.cli import cli
from bapipe.errors import BaPipeError
from bapipe.records.plan import read_plan
from command import refused
from paths import REPOSITORY

TYPE = """
schema = "bapipe.cluster/1"
name = "own boards"
topology = "chain"

[types.own]
kind = "fpga"
memory = {memory}
memory_bandwidth = {bandwidth}
link_bandwidth = "100 Gb/s"
{board}

[[accelerators]]
type = "own"
count = 3
"""


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "96", "NO_COLOR": "1"}).invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


BOARD = "board = { dsp = 900, on_chip_bytes = 4e6, clock = 2e8 }"


def own_cluster(folder: Path, *, board: str, memory: str = '"4 GB"', bandwidth: str = '"20 GB/s"') -> str:
    path = folder / "own.toml"
    path.write_text(TYPE.format(board=board, memory=memory, bandwidth=bandwidth), encoding="utf-8")
    return str(path)


def test_a_plan_shows_every_board(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = run("plan", "resnet18", "--cluster", "2xvcu129+1xvcu118", "--global-batch", "32", "--dtype", "fp16",
               "--out", str(out), "--explain")  # fmt: skip
    for part in (
        "fbp-as over 3 stages", "ρ", "FP", "EB", "WG", "eff.", "gradients", "hosted", "Gb/s back", "binds",
        "paper-ddr", "greedy-on-chip", "batched-reuse", "weight_reads", "vcu118.board", "intra-layer",
    ):  # fmt: skip
        assert part in text, part
    plan = read_plan(out)
    assert plan.deployment is not None
    assert [board.type for board in plan.deployment.boards] == ["vcu129", "vcu129", "vcu118"]
    assert plan.prediction.source == "simulated"


def test_json_has_the_deployment() -> None:
    found = json.loads(run("plan", "alexnet", "--cluster", "2xvcu118", "--json", "--dataset-size", "1000"))
    assert found["schedule"] in ("fbp-as", "1f1b-as")
    assert len(found["deployment"]["boards"]) == 2
    assert found["epoch_time"] > 0


def test_strategies_can_be_compared() -> None:
    found = json.loads(run("plan", "resnet18", "--cluster", "2xvcu118", "--compare", "--json"))
    times = {row["strategy"]: row["time"] for row in found["strategies"]}
    assert set(times) == {"exact", "bapipe", "uniform", "time"}
    assert times["exact"] == min(times.values())
    assert "strategies by the same model" in run("plan", "resnet18", "--cluster", "2xvcu118", "--compare")


def test_a_layer_table_and_a_board_of_ones_own(tmp_path: Path) -> None:
    cluster = own_cluster(
        tmp_path, board='board = { dsp = 900, bram_bytes = "4 MB", uram_bytes = "8 MB", clock = 2e8 }'
    )
    table = REPOSITORY / "examples" / "layers-small-cnn.toml"
    assert "small-cnn: fbp-as" in run("plan", str(table), "--cluster", cluster, "--global-batch", "16")


@pytest.mark.parametrize(
    ("model", "board", "message"),
    [
        ("vgg16", BOARD.replace("900", "0"), "dsp must be more than 0, got 0"),
        ("vgg16", 'flops = { fp16 = "1 TFLOPS" }', "board 'own' has no DSPs to multiply with"),
        ("vgg16", BOARD, "layer 'conv1_2' needs at least"),
        ("gnmt-8", BOARD, "is of kind embedding"),
        ("nothing", BOARD, "unknown model 'nothing'"),
        ("vgg16", BOARD.replace("clock", "usable_ram = 2, clock"), "at most 1"),
        ("vgg16", BOARD.replace("on_chip_bytes = 4e6, ", ""), "'on_chip_bytes' is missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, model: str, board: str, message: str) -> None:
    cluster = own_cluster(tmp_path, board=board, memory="0", bandwidth="0")
    assert message in refused("plan", model, "--cluster", cluster)


def test_planning_fpgas_does_not_load_torch() -> None:
    program = (
        "import sys; from bapipe.cli import cli; "
        "cli(['plan', 'alexnet', '--cluster', 'vcu118', '--json'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=120)


def test_what_if_over_dsps_and_links(tmp_path: Path) -> None:
    svg = tmp_path / "grid.svg"
    arguments = ("what-if", "alexnet", "--cluster", "2xvcu118", "--global-batch", "32", "--sweep",
                 "board.dsp=500,50000", "--sweep", "link=0.02..400Gb/s", "--points", "2")  # fmt: skip
    text = run(*arguments, "--svg", str(svg))
    assert "twice as much saves: " in text
    assert "link 0.02 Gb/s: at board.dsp 500 DSP binds" in text
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert len(root.findall(".//*[@class='line']")) == 2
    found = json.loads(run(*arguments, "--json"))
    answers = {tuple(point["at"]): point["answer"] for point in found["points"]}
    assert answers[1, 1]["time"] < answers[0, 1]["time"]
    assert answers[1, 1]["time"] < answers[1, 0]["time"]
    assert answers[0, 0]["gains"]["DSP"] > 0.4 > answers[1, 0]["gains"]["DSP"]
    assert answers[1, 1]["binds"].startswith(("DDR", "RAM"))


@pytest.mark.parametrize("sweep", ["memory=1GB,16GB", "count=1..2", "link=1..20GB/s"])
def test_what_if_works_for_gpus_too(sweep: str) -> None:
    options = ("--cluster", "2xv100", "--global-batch", "64", "--points", "2")
    text = run("what-if", "alexnet", *options, "--sweep", sweep)
    assert f"at {sweep.split('=')[0]} " in text
    assert "binds" in text


def test_a_cluster_that_fits_nothing_is_a_point_without_time() -> None:
    text = run("what-if", "vgg16", "--cluster", "2xv100", "--global-batch", "4", "--sweep", "memory=0.1GB,16GB")
    assert "–" in text
    assert "at memory 100 MB memory binds: nothing fits" in text


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["link"], "a sweep looks like"),
        (["lnk=1..2GB/s"], "did you mean 'link'"),
        (["board.dps=1..2"], "did you mean 'board.dsp'"),
        (["link=5..1GB/s"], "must go up"),
        (["link=0..1GB/s"], "more than 0"),
        (["board.dsp=1.5,2"], "must be a whole number"),
        (["board.dsp=x"], "must be a number"),
        (["vcu119.dsp=5,6"], "did you mean 'vcu118'"),
        (["link=1..2GB/s"] * 3, "give one --sweep or two"),
        (["board.utilisation=0.5,2"], "share of at most 1"),
        (["count=0.5,2"], "must be a whole number"),
    ],
)
def test_bad_sweeps_are_refused(sweep: list[str], message: str) -> None:
    arguments = [item for text in sweep for item in ("--sweep", text)]
    with pytest.raises(BaPipeError, match=message):
        cli.main(["what-if", "alexnet", "--cluster", "vcu118", *arguments], standalone_mode=False)


def test_figures_of_a_board_are_not_a_gpus() -> None:
    with pytest.raises(BaPipeError, match="'v100-16' is no FPGA board"):
        cli.main(["what-if", "alexnet", "--cluster", "v100", "--sweep", "board.dsp=5,6"], standalone_mode=False)
    with pytest.raises(BaPipeError, match="--assume is for FPGA clusters"):
        cli.main(["plan", "alexnet", "--cluster", "v100", "--assume", "reuse=2"], standalone_mode=False)
