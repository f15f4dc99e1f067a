from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.files import dump_json
from bapipe.model import ModelRef
from bapipe.run_record import (
    CheckRecord,
    EventRecord,
    RunEnvironment,
    RunRecord,
    StepRecord,
    TransferRecord,
    read_run,
    to_timeline,
    write_run,
)
from bapipe.schedule.actions import Kind

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def record() -> RunRecord:
    """
    rank 0   0F0 0F1 ··· 0B0 0B1 0U     one second each, transfers of half a second
    rank 1       1F0 1B0 1F1 1B1 1U
    """
    lanes = (
        (("0F0", 0.0), ("0F1", 1.0), ("0B0", 4.0), ("0B1", 6.0), ("0U", 7.0)),
        (("1F0", 1.5), ("1B0", 2.5), ("1F1", 3.5), ("1B1", 4.5), ("1U", 5.5)),
    )
    return RunRecord(
        model=ModelRef(name="tiny", ref="tiny:build"),
        plan_hash="0" * 16,
        environment=RunEnvironment(torch="2.13", python="3.11", hosts=("a", "a"), backend="gloo", threads=1),
        world_size=2,
        steps=(StepRecord(step=0, loss=2.5, seconds=9.0), StepRecord(step=1, loss=None, seconds=8.5)),
        recorded_step=1,
        events=tuple(
            EventRecord(rank=rank, action=action, start=start, end=start + 1)
            for rank, lane in enumerate(lanes)
            for action, start in lane
        ),
        transfers=(
            TransferRecord(action="0F0", to_rank=1, start=1.0, arrival=1.5),
            TransferRecord(action="0F1", to_rank=1, start=2.0, arrival=3.5),
            TransferRecord(action="1B0", to_rank=0, start=3.5, arrival=4.0),
            TransferRecord(action="1B1", to_rank=0, start=5.5, arrival=6.0),
        ),
        peak_live=(2, 1),
        peak_memory=(10, None),
    )


def test_a_written_record_reads_back_the_same(record: RunRecord, tmp_path: Path) -> None:
    checked = replace(
        record,
        check=CheckRecord(
            steps=2, gradient_difference=0.0, parameter="a.weight", loss_difference=0.0, tolerance=1e-12
        ),
    )
    for each in (record, checked, replace(record, transfers=None)):
        write_run(each, tmp_path / "run.json")
        assert read_run(tmp_path / "run.json") == each


def test_the_timeline_is_what_was_recorded(record: RunRecord) -> None:
    timeline = to_timeline(record)
    assert (timeline.num_ranks, timeline.num_stages, timeline.num_microbatches) == (2, 2, 2)
    assert timeline.time == 8.0
    assert timeline.busy() == [5.0, 5.0]
    assert timeline.bubble == pytest.approx(1 - 10 / 16)
    assert timeline.peak_live() == [2, 1]
    assert timeline.exposed_communication() == [1.0, 0.5]
    assert timeline.microbatches[timeline.kinds == Kind.U].tolist() == [-1, -1]


def test_a_timeline_needs_no_transfers(record: RunRecord) -> None:
    timeline = to_timeline(replace(record, transfers=None))
    assert len(timeline.transfers) == 0
    assert timeline.time == 8.0


def test_the_check_passes_within_its_tolerance() -> None:
    check = CheckRecord(steps=1, gradient_difference=1e-13, parameter="w", loss_difference=0.0, tolerance=1e-12)
    assert check.passed
    assert not replace(check, loss_difference=1e-11).passed
    assert not replace(check, gradient_difference=1e-11).passed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": ()}, "no steps or no events"),
        ({"events": ()}, "no steps or no events"),
        ({"recorded_step": 7}, "records step 7, which it has not run"),
        ({"world_size": 1}, "event 1F0 on rank 1"),
        ({"events": (EventRecord(rank=0, action="0F0", start=2.0, end=1.0),)}, "from 2 to 1 s"),
        ({"events": (EventRecord(rank=0, action="0F0", start=-1.0, end=1.0),)}, "from -1 to 1 s"),
    ],
)
def test_a_record_that_cannot_be_is_refused(record: RunRecord, change: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        replace(record, **change)  # type: ignore[arg-type]


def test_a_transfer_needs_the_action_that_made_it(record: RunRecord) -> None:
    stray = TransferRecord(action="0F9", to_rank=1, start=0.0, arrival=1.0)
    with pytest.raises(BaPipeError, match="transfer of 0F9"):
        to_timeline(replace(record, transfers=(stray,)))


def test_another_file_is_refused(record: RunRecord, tmp_path: Path) -> None:
    data = json.loads(dump_json(record))
    for change, message in (
        ({"schema": "bapipe.plan/1"}, "expected 'bapipe.run/1'; give the right file"),
        ({"schema": "bapipe.run/0"}, "make it again"),
        ({"peak_lives": [1]}, "unknown key 'peak_lives' .did you mean 'peak_live'"),
        ({"world_size": "two"}, "world_size: expected a whole number"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({**data, **change}), encoding="utf-8")
        with pytest.raises(FileFormatError, match=message):
            read_run(tmp_path / "run.json")


def test_the_example_is_a_run_of_two_ranks() -> None:
    record = read_run(ROOT / "examples" / "run.json")
    timeline = to_timeline(record)
    assert record.world_size == timeline.num_ranks == 2
    assert record.check is not None
    assert record.check.passed
    assert tuple(timeline.peak_live()) == record.peak_live
    assert 0 < timeline.time <= max(step.seconds for step in record.steps)
