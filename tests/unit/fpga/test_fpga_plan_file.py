"""A plan for FPGAs is the same in memory as in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.cluster_files import read_cluster
from bapipe.explore import Request
from bapipe.files import content_hash
from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.plan import read_plan, write_plan
from bapipe.plan_inputs import layers_for_fpgas


@pytest.mark.parametrize(("model", "cluster"), [("alexnet", "2xvcu118"), ("resnet18", "2xvcu129+2xvcu118")])
def test_the_hash_is_that_of_the_file(model: str, cluster: str, tmp_path: Path) -> None:
    found = explore_fpga(layers_for_fpgas(model), read_cluster(cluster), Request(minibatch=32))
    plan = make_fpga_plan(found)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert content_hash(again) == content_hash(plan)
    assert plan.deployment is not None
    assert all(isinstance(board.ram_hosted, float) for board in plan.deployment.boards)
