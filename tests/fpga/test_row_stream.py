"""The model's slot time against an independent simulation, row by row and cycle by cycle."""

from __future__ import annotations

import pytest
from row_stream import Conv, Tiles, build, interval

from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.planner import Request
from bapipe.records.fpga_deployment import BoardDeployment
from fpga_cases import cluster_of, conv_model

SHAPES = {
    "widening": [Conv(3, 32, 3, 24, 24), Conv(32, 48, 3, 24, 24), Conv(48, 64, 3, 24, 24)],
    "pointwise between": [Conv(16, 64, 1, 16, 16), Conv(64, 24, 3, 16, 16), Conv(24, 96, 1, 16, 16)],
    "large kernel": [Conv(3, 24, 7, 32, 20), Conv(24, 40, 5, 32, 20), Conv(40, 10, 3, 32, 20)],
}


def board_of(convs: list[Conv], dsp: int) -> BoardDeployment:
    model = conv_model([(c.inputs, c.outputs, c.kernel, c.height, c.width) for c in convs])
    found = explore_fpga(
        model, cluster_of(1, dsp=dsp, utilisation=1.0), Request(global_batch=8, microbatch=1, schedule="fbp-as")
    )
    deployment = make_fpga_plan(found).deployment
    assert deployment is not None
    return deployment.boards[0]


@pytest.mark.parametrize("dsp", [150, 700, 3000])
@pytest.mark.parametrize("shape", SHAPES)
def test_three_layers_stream_at_the_models_slot_time(shape: str, dsp: int) -> None:
    convs = SHAPES[shape]
    board = board_of(convs, dsp)
    tiles: list[Tiles] = []
    depths: list[tuple[int, int]] = []
    for index in range(3):
        own = {item.module: item for item in board.modules if item.layer == f"conv{index}"}
        size = {name: (item.tn or 0, item.tm or 0, item.tk or 0) for name, item in own.items()}
        tiles.append(Tiles(forward=size["FP"], error=size.get("EB"), gradient=size["WG"]))
        rows = {fifo.stream: fifo.rows for fifo in board.fifos if fifo.layer == f"conv{index}"}
        depths.append((rows["features"], rows["errors"]))
    predicted = board.interval * 250e6
    seen = interval(build(convs, tiles, depths), images=24)
    assert seen == pytest.approx(predicted, rel=0.05)


def test_the_simulation_notices_a_fifo_that_is_too_shallow() -> None:
    convs = SHAPES["widening"]
    tiles = [Tiles(forward=(3, 8, 9), error=None, gradient=(3, 8, 9))]
    tiles += [Tiles(forward=(8, 8, 9), error=(8, 8, 9), gradient=(8, 8, 9))] * 2
    with pytest.raises(AssertionError, match="too shallow"):
        interval(build(convs, tiles, [(2, 1)] * 3), images=4)
