"""Which plans the same processes run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials import run_trials as trials
from made_profiles import made_profile

TYPES = ("fast", "slow")


def planned() -> Plan:
    """Two stages, on accelerators of two types."""
    kinds = {
        name: AcceleratorType(
            name=name, kind="cpu", flops={"fp32": 1e9}, memory=1e9, memory_bandwidth=1e9, execution="synchronous"
        )
        for name in TYPES
    }
    members = tuple(Accelerator(name=f"here/{index}", type=name, node="here") for index, name in enumerate(TYPES))
    cluster = Cluster(name="two", accelerators=members, types=kinds, within=Link(bandwidth=1e9, latency=1e-6))
    profile = made_profile({name: [1.0] * 4 for name in TYPES}, sizes=(1,))
    return make_plan(explore(profile, cluster, Request(global_batch=4, microbatch=1, schedule="gpipe", stages=2)))


def test_a_process_stays_on_its_type_of_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a slice of a GPU cannot move to a larger one for the next plan."""
    launched: list[list[int]] = []

    def launch(_plans: Sequence[Plan], waiting: list[int], *_: object) -> list[int]:
        launched.append(waiting)
        return []

    monkeypatch.setattr(trials, "_launch", launch)
    one = planned()
    stages = [
        replace(stage, accelerators=other.accelerators)
        for stage, other in zip(one.stages, reversed(one.stages), strict=True)
    ]
    swapped = replace(one, stages=tuple(stages))
    assert swapped.ranks == one.ranks[::-1]
    trials.run_trials([one, swapped, one], RunOptions(), code=Path.cwd(), times=2)
    assert launched == [[0, 2, 0, 2], [1, 1]]
