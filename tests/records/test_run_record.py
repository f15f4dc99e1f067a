from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.files import dump_json
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore, make_plan
from bapipe.records.run_record import (
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
from bapipe.torch.launch.run_report import RankReport, make_record
from made_profiles import made_cluster, made_profile
from paths import REPOSITORY

ROOT = REPOSITORY


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
        peak_in_flight=(2, 1),
        peak_memory=(10, None),
    )


def test_a_written_record_reads_back_the_same(record: RunRecord, tmp_path: Path) -> None:
    checked = replace(
        record,
        check=CheckRecord(
            steps=2, gradient_difference=0.0, parameter="a.weight", loss_difference=0.0, tolerance=1e-12
        ),
    )
    elsewhere = replace(record.environment, devices=("cpu", "cuda"), transport="pinned")
    told = replace(record, environment=elsewhere, memory_source=("resident", "allocated"))
    for each in (record, checked, told, replace(record, transfers=None)):
        write_run(each, tmp_path / "run.json")
        assert read_run(tmp_path / "run.json") == each


def test_the_timeline_is_what_was_recorded(record: RunRecord) -> None:
    timeline = to_timeline(record)
    assert (timeline.num_ranks, timeline.num_stages, timeline.num_microbatches) == (2, 2, 2)
    assert timeline.time == 8.0
    assert timeline.busy() == [5.0, 5.0]
    assert timeline.bubble == pytest.approx(1 - 10 / 16)
    assert timeline.peak_in_flight() == [2, 1]
    assert timeline.exposed_communication() == [1.0, 0.5]
    assert timeline.microbatches[timeline.kinds == Kind.U].tolist() == [-1, -1]


def test_a_timeline_needs_no_transfers(record: RunRecord) -> None:
    timeline = to_timeline(replace(record, transfers=None))
    assert len(timeline.transfers) == 0
    assert timeline.time == 8.0


def test_an_all_reduce_has_a_lane_of_its_own(record: RunRecord) -> None:
    """It runs beside the last backward, so the update after it does not follow it on its lane."""
    reduced = EventRecord(rank=0, action="0A", start=6.5, end=7.0)
    timeline = to_timeline(replace(record, events=(*record.events, reduced)))
    assert timeline.lanes.tolist() == [0] * len(record.events) + [1]
    assert timeline.busy() == [5.0, 5.0]
    assert timeline.previous_end()[timeline.kinds == Kind.A].tolist() == [0.0]


def test_a_record_of_before_devices_and_memory_sources_still_reads(record: RunRecord, tmp_path: Path) -> None:
    data = json.loads(dump_json(record))
    del data["memory_source"], data["environment"]["devices"], data["environment"]["transport"]
    (tmp_path / "run.json").write_text(json.dumps(data), encoding="utf-8")
    assert read_run(tmp_path / "run.json") == record


def _gathered(*reports: RankReport) -> RunRecord:
    profile, cluster = made_profile({"x": [1.0] * 4}), made_cluster({"x": len(reports)})
    plan = make_plan(explore(profile, cluster, Request(global_batch=4, microbatch=1)))
    return make_record(
        plan,
        reports,
        steps=[(2.0, 3.0), (float("nan"), 1.0)],
        recorded_step=1,
        torch_version="2",
        python_version="3",
        backend="gloo",
        threads=1,
        check=None,
        transport="pinned",
    )


def test_what_ranks_say_becomes_one_record() -> None:
    """Stage 0 is on both ranks, stage 1 on rank 1 alone, which computes on a GPU."""
    record = _gathered(
        RankReport(
            rank=1,
            host="b",
            events=(("0F1", 12.0, 13.0), ("1F0", 13.0, 14.0)),
            sent={},
            arrived={"0F0": 12.5},
            peak_in_flight={0: 3, 1: 1},
            peak_memory=7,
            device="cuda",
        ),
        RankReport(
            rank=0,
            host="a",
            events=(("0F0", 10.0, 11.0),),
            sent={"0F0": (1, 11.0)},
            arrived={},
            peak_in_flight={0: 2},
            peak_memory=900,
        ),
    )
    assert record.environment.hosts == ("a", "b")
    assert record.environment.devices == ("cpu", "cuda")
    assert record.environment.transport == "pinned"
    assert record.peak_in_flight == (3, 1)
    assert record.peak_memory == (900, 7)
    assert record.memory_source == ("resident", "allocated")
    assert record.events[0] == EventRecord(rank=0, action="0F0", start=0.0, end=1.0)
    assert record.transfers == (TransferRecord(action="0F0", to_rank=1, start=1.0, arrival=2.5),)
    assert [step.loss for step in record.steps] == [2.0, None]


def test_a_rank_with_one_stage_may_say_one_number() -> None:
    said = RankReport(
        rank=0,
        stage=0,
        host="a",
        events=(("0F0", 0.0, 1.0),),
        sent={},
        arrived={},
        peak_in_flight=4,
        peak_memory=None,
        memory_source="allocated",
    )
    assert _gathered(said).peak_in_flight == (4,)
    assert _gathered(said).memory_source == ("allocated",)


def test_the_check_passes_within_its_tolerance() -> None:
    check = CheckRecord(steps=1, gradient_difference=1e-13, parameter="w", loss_difference=0.0, tolerance=1e-12)
    assert check.passed
    assert not replace(check, loss_difference=1e-11).passed
    assert not replace(check, gradient_difference=1e-11).passed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": ()}, "the run has no steps"),
        ({"recorded_step": 7}, "records step 7, which it has not run"),
        ({"world_size": 1}, "event 1F0 on rank 1"),
        ({"peak_memory": (1,)}, "peak_memory has 1 entries for 2 ranks"),
        ({"memory_source": ("allocated",)}, "memory_source has 1 entries for 2 ranks"),
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
        ({"schema": "bapipe.plan/1"}, "expected 'bapipe.run/1'; it is a plan, give the record of a run here"),
        ({"schema": "bapipe.run/0"}, "make it again"),
        ({"peak_in_flights": [1]}, "unknown key 'peak_in_flights' .did you mean 'peak_in_flight'"),
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
    assert tuple(timeline.peak_in_flight()) == record.peak_in_flight
    assert 0 < timeline.time <= max(step.seconds for step in record.steps)
