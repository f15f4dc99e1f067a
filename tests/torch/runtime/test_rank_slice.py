"""A rank takes the slice that its plan has for it; ranks on whole GPUs get nothing that NCCL would mind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, read_plan
from bapipe.torch import slices
from bapipe.torch.runtime.rank_slice import take_slice
from paths import REPOSITORY

NAMES = ("NCCL_HOSTID", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_VISIBLE_DEVICES")


def plan_on(type_: str) -> Plan:
    plan = read_plan(REPOSITORY / "examples" / "plan.json")
    accelerators = tuple(replace(item, type=type_) for item in plan.cluster.accelerators)
    kind = replace(next(iter(plan.cluster.types.values())), name=type_)
    return replace(plan, cluster=replace(plan.cluster, accelerators=accelerators, types={type_: kind}))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four slices of the first GPU and none of a second; what is set is forgotten afterwards."""
    cut = slices.Slices(gpu=0, percentages=(25.0,) * 4, memory=16e9, folder=str(tmp_path))
    monkeypatch.setattr(slices, "status", lambda gpu: cut if gpu == 0 else None)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in NAMES})


def test_a_rank_on_a_slice_is_a_host_of_its_own_for_nccl() -> None:
    plan = plan_on("h200-25pct")
    take_slice(plan, 0, None)
    first = os.environ.pop("NCCL_HOSTID")
    assert os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == "25"
    take_slice(plan, 1, None)
    assert os.environ["NCCL_HOSTID"] not in ("", first)


@pytest.mark.parametrize("type_, device", [("h200", None), ("cpu-core", None), ("h200-25pct", "cpu")])
def test_other_ranks_keep_their_environment(type_: str, device: str | None) -> None:
    """With an NCCL_HOSTID of its own, a GPU would have neither NVLink nor shared memory."""
    before = dict(os.environ)
    take_slice(plan_on(type_), 1, device)
    assert os.environ == before
    assert not {"NCCL_HOSTID"} & set(os.environ)


def test_a_rank_that_was_started_on_a_slice_stays_there() -> None:
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
    before = dict(os.environ)
    take_slice(plan_on("h200-25pct"), 1, None)
    assert os.environ == before


def test_slices_other_than_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaPipeError, match=r"the plan has h200-50pct where slice 1 has 25 %"):
        take_slice(plan_on("h200-50pct"), 1, None)
    monkeypatch.setattr(slices, "status", lambda _: None)
    with pytest.raises(BaPipeError, match=r"no slice 1 here; start them with bapipe slices start --count 4"):
        take_slice(plan_on("h200-25pct"), 1, None)
