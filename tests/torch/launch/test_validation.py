"""A plan is checked once per run: by the launcher, which its ranks trust, or by who makes the Pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paths import REPOSITORY

pytest.importorskip("torch", reason="a rank needs torch: pip install bapipe[torch]")

from bapipe.errors import BaPipeError
from bapipe.records.plan import read_plan, write_plan
from bapipe.schedule.actions import Schedule
from bapipe.schedule.validate import Sends
from bapipe.torch.health.rank_end import RankEnd
from bapipe.torch.launch import launcher, worker
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.supervise import Ended
from bapipe.torch.runtime import plan_checks
from bapipe.torch.runtime.plan_checks import as_runnable, check_plan, trusted_plan

EXAMPLE = REPOSITORY / "examples" / "plan.json"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the name of every schedule that is validated."""
    seen: list[str] = []
    real = plan_checks.require_valid

    def counted(schedule: Schedule, *, sends: Sends) -> None:
        seen.append(schedule.name)
        real(schedule, sends=sends)

    monkeypatch.setattr(plan_checks, "require_valid", counted)
    return seen


def test_the_launcher_checks_once_and_its_ranks_trust_it(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def no_ranks(_ranks: int, program: list[str], *_: object, **__: object) -> Ended:
        started.append(program)
        return Ended(ranks=(RankEnd(rank=0, code=1, at=1.0),), stopped_by=None, killed=False)

    monkeypatch.setattr(launcher, "run_local", no_ranks)
    assert launcher.launch(EXAMPLE, RunOptions(), restarts=2) == 1
    assert (len(started), len(checks)) == (3, 1)
    rank = worker._arguments(started[0][started[0].index(str(EXAMPLE)) :])
    assert worker._read_plan(rank) == check_plan(read_plan(EXAMPLE))
    assert len(checks) == 2, "this test's own check_plan, and none of the rank"


def test_a_rank_that_no_launcher_started_checks_itself(checks: list[str]) -> None:
    worker._read_plan(worker._arguments([str(EXAMPLE)]))
    assert len(checks) == 1


def test_what_is_trusted_is_what_was_checked(checks: list[str], tmp_path: Path) -> None:
    plan = read_plan(EXAMPLE)
    checked = as_runnable(EXAMPLE, flushes=True)
    assert len(checks) == 1
    assert as_runnable(checked, flushes=True) is checked
    assert trusted_plan(plan) == checked
    assert len(checks) == 1
    write_plan(replace(plan, model=replace(plan.model, ref=None)), tmp_path / "plan.json")
    with pytest.raises(BaPipeError, match="names no code to run"):
        as_runnable(str(tmp_path / "plan.json"), flushes=True)
