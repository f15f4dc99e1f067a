"""Two plans on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import bapipe
from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, write_plan
from bapipe.reporting.html.document import make_subject
from bapipe.reporting.html.side_by_side import memory_curve, render_side_by_side
from command import bapipe as command


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    def of(schedule: str) -> Plan:
        return bapipe.plan("alexnet", "2xv100", global_batch=64, micro_batch=8, stages=2, schedule=schedule)

    return of("gpipe"), of("1f1b-sno")


def test_the_page_has_both_and_asks_for_nothing(plans: tuple[Plan, Plan]) -> None:
    page = render_side_by_side(plans)
    data = json.loads(re.search(r'id="bapipe-data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert [timeline["name"] for timeline in data["timelines"]] == ["A", "B"]
    assert data["grouped"]
    for plan in plans:
        assert repr(plan.prediction.throughput) in page
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "prefers-reduced-motion: reduce" in page


def test_memory_over_time_ends_at_the_peak_of_the_fullest_rank(plans: tuple[Plan, Plan]) -> None:
    for plan in plans:
        view = make_subject(plan).memory
        curve = memory_curve(view)
        assert np.all(np.diff(curve["times"]) > 0)
        assert max(curve["bytes"]) == pytest.approx(max(rank.peak for rank in view.ranks))


def test_plans_of_two_models_are_refused(plans: tuple[Plan, Plan]) -> None:
    other = bapipe.plan("vgg16", "2xv100", global_batch=64)
    with pytest.raises(BaPipeError, match="one plan is of alexnet and the other of vgg16; compare two"):
        render_side_by_side([plans[0], other])
    with pytest.raises(BaPipeError, match="two plans stand side by side, got 1"):
        render_side_by_side(plans[:1])


def test_the_command(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    for name, plan in zip("ab", plans, strict=True):
        write_plan(plan, tmp_path / f"{name}.json")
    done = command("report", "a.json", "--beside", "b.json", "-o", "both.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote both.html" in done.stdout
    done = command("report", "a.json", "--beside", "b.json", "--explain", folder=tmp_path)
    assert done.returncode == 2
    assert "give no run, and no option but --out" in done.stderr
