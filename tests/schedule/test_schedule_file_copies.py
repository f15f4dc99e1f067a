"""A schedule file that lists one of several alike pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.errors import ScheduleError
from bapipe.io.files import dump_json
from bapipe.schedule.generators import capped, with_update
from bapipe.schedule.replicas import first_replica, replicated_pipelines
from bapipe.schedule.schedule_file import ScheduleFile, read_schedule
from bapipe.schedule.validate import require_valid


@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1, 3]], ids=str)
def test_it_stands_for_all(replicas: list[int], tmp_path: Path) -> None:
    one = with_update(capped(3, 6, [3, 2, 1], replicas=replicas), replicas=4)
    whole = replicated_pipelines([one] * 4)
    path = tmp_path / "schedule.json"
    path.write_text(dump_json(ScheduleFile.of(one, copies=4)), encoding="utf-8")
    read = read_schedule(path)
    assert read == whole
    require_valid(read)
    assert len(ScheduleFile.of(one, copies=4).lanes) == len(one.lanes)


def test_replicas_of_a_stage_are_dealt_as_those_of_a_schedule_that_has_all() -> None:
    """Two copies of stages 2-1 are the stages 4-2: the same micro-batches on the same ranks."""
    one = capped(2, 8, [4, 2], replicas=[2, 1])
    both = replicated_pipelines([one] * 2)
    assert both.placement == capped(2, 16, [8, 4], replicas=[4, 2]).placement
    assert both.lanes == capped(2, 16, [8, 4], replicas=[4, 2]).lanes
    assert first_replica(one, 2).placement == both.placement


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"copies": 0}, "copies must lie between"), ({"copies": 9}, "which has no stage|is outside")],
)
def test_others_are_refused(changes: dict[str, int], message: str) -> None:
    file = replace(ScheduleFile.of(capped(2, 4, [2, 1]), copies=2), **changes)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=message):
        file.to_schedule()
