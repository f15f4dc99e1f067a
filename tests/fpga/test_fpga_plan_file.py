"""A plan for FPGAs is the same in memory as in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import content_hash
from bapipe.planner import Request
from bapipe.planner.inputs import layers_for_fpgas
from bapipe.records.plan import read_plan, write_plan


@pytest.mark.parametrize(("model", "cluster"), [("alexnet", "2xvcu118"), ("resnet18", "2xvcu129+2xvcu118")])
def test_the_hash_is_that_of_the_file(model: str, cluster: str, tmp_path: Path) -> None:
    found = explore_fpga(layers_for_fpgas(model), read_cluster(cluster), Request(global_batch=32))
    plan = make_fpga_plan(found)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert content_hash(again) == content_hash(plan)
    assert plan.deployment is not None
    assert all(isinstance(board.ram_hosted, float) for board in plan.deployment.boards)
