"""Cuts, schedules, micro-batches, devices and predictions stay as recorded when only the structure changes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from reference_plans import REFERENCE, Case, cases, planned

EXPECTED = json.loads(REFERENCE.read_text(encoding="utf-8"))
SAMPLE = {
    "vgg16 on 4xv100",
    "gnmt-8 on 2xa100+2xv100",
    "bert-large on 8xa100",
    "profiles/h200/vgg16-fp32.json on 4xh200-25pct",
    "split layers",
    "two nodes",
    "interleaved",
    "FPGAs",
}
ALL = [pytest.param(case, id=case.name, marks=() if case.name in SAMPLE else pytest.mark.slow) for case in cases()]


@pytest.mark.parametrize("case", ALL)
def test_the_plan_is_the_recorded_one(case: Case) -> None:
    expected, found = EXPECTED[case.name], planned(case)
    assert found.get("exit") == expected.get("exit")
    assert found.get("words") == expected.get("words")
    assert _figures(found) == pytest.approx(_figures(expected), rel=1e-9)


def _figures(plan: dict[str, Any]) -> list[float]:
    """What does not fit has no time: infinite, because `approx` compares nothing with None."""
    return [math.inf if figure is None else figure for figure in plan.get("figures", [])]


def test_every_recorded_plan_is_compared() -> None:
    names = {case.name for case in cases()}
    assert names == EXPECTED.keys()
    assert names >= SAMPLE
