"""Schedule files: what goes out comes back, torch takes ours, and a hostile file costs one line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bapipe.errors import BaPipeError, FileFormatError, ScheduleError
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import SCHEDULES, data_parallel, make_schedule, with_recompute, with_update
from bapipe.schedule.schedule_file import from_torch_csv, read_schedule, to_torch_csv, write_schedule
from bapipe.schedule.validate import check

MADE = {
    **{name: make_schedule(name, 3, 5) for name in SCHEDULES},
    "1f1b": make_schedule("1f1b", 3, 5, caps=[5, 3, 1]),
    "fbp-as static": make_schedule("fbp-as", 3, 5, slots="static"),
    "replicas": with_update(make_schedule("1f1b-so", 3, 5, replicas=[2, 3, 1])),
    "data-parallel": data_parallel(4, 2),
    "recompute": with_recompute(make_schedule("zb-h1", 3, 5)),
    "one": make_schedule("gpipe", 1, 1),
}
FOR_TORCH = [name for name in SCHEDULES if name != "fbp-as"] + ["1f1b", "one"]


@pytest.mark.parametrize("name", MADE)
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    write_schedule(MADE[name], tmp_path / "schedule.json")
    assert read_schedule(tmp_path / "schedule.json") == MADE[name]


def test_json_is_stable_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    write_schedule(MADE["1f1b-sno"], path)
    first = path.read_bytes()
    write_schedule(read_schedule(path), path)
    assert path.read_bytes() == first
    data = json.loads(first)
    assert data["schema"] == "bapipe.schedule/1"
    assert data["lanes"][2]["actions"][:4] == ["2F0", "2B0", "2F1", "2B1"]


class TestTorchCsv:
    @pytest.mark.parametrize("name", FOR_TORCH)
    def test_round_trip(self, name: str, tmp_path: Path) -> None:
        """The orders come back; caps, links and versions are not in torch's format."""
        write_schedule(MADE[name], tmp_path / "schedule.csv")
        back = read_schedule(tmp_path / "schedule.csv")
        assert [list(lane) for lane in back.lanes] == [list(lane) for lane in MADE[name].lanes]
        assert back.placement == MADE[name].placement
        assert (back.num_stages, back.num_microbatches) == (MADE[name].num_stages, MADE[name].num_microbatches)
        assert back.name == "schedule"
        assert check(back) == []
        assert to_torch_csv(back) == to_torch_csv(MADE[name])

    def test_text(self) -> None:
        assert to_torch_csv(make_schedule("1f1b-sno", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

    def test_bubbles_and_blank_rows_are_left_out(self) -> None:
        schedule = from_torch_csv("0F0,,0B0\n\n, 1F0 ,None,1B0\n")
        assert [[str(action) for action in lane] for lane in schedule.lanes] == [["0F0", "0B0"], ["1F0", "1B0"]]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fbp-as", "one lane per rank, rank 0 has more; write JSON"),
            ("replicas", "cannot hold replicated stages; write JSON"),
            ("recompute", "no action 0R0; write JSON"),
        ],
    )
    def test_what_it_cannot_hold(self, name: str, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            to_torch_csv(MADE[name])

    @pytest.mark.parametrize("name", FOR_TORCH)
    def test_torch_accepts_it(self, name: str) -> None:
        """torch's validator, and its own insertion and simulation of the communication."""
        torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
        schedule = MADE[name]
        rows = csv.reader(io.StringIO(to_torch_csv(schedule)))
        orders = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        mapping = torch_schedules._validate_schedule(
            orders, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        )
        assert mapping == {stage: ranks[0] for stage, ranks in enumerate(schedule.placement)}
        with_sends = torch_schedules._add_send_recv(orders, lambda stage: mapping[stage], schedule.num_stages)
        assert torch_schedules._simulate_comms_compute(
            with_sends, lambda stage: mapping[stage], schedule.num_stages
        )

    def test_torch_refuses_what_we_refuse(self) -> None:
        torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
        text = "0F0,0B0,0F1\n"
        assert check(from_torch_csv(text))
        actions = [torch_schedules._Action.from_str(cell) for cell in text.strip().split(",")]
        with pytest.raises(AssertionError):
            torch_schedules._validate_schedule({0: actions}, 1, 1, 2)


def good() -> dict[str, Any]:
    return {
        "schema": "bapipe.schedule/1",
        "name": "mine",
        "stages": 2,
        "microbatches": 1,
        "placement": [[0], [1]],
        "lanes": [{"rank": 0, "actions": ["0F0", "0B0"]}, {"rank": 1, "actions": ["1F0", "1B0"]}],
    }


def refused(path: Path, text: str | bytes, *, kind: type[BaPipeError] = BaPipeError) -> str:
    """The message with which reading the file fails: one line of bounded length."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(kind) as caught:
        read_schedule(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


class TestHostileJson:
    def test_the_example_is_good(self, tmp_path: Path) -> None:
        path = tmp_path / "s.json"
        path.write_text(json.dumps(good()))
        assert check(read_schedule(path)) == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not valid JSON"),
            ("{", "not valid JSON.*line 1.*is it cut off"),
            ("[]", "no 'schema' entry"),
            ("null", "no 'schema' entry"),
            ("[" * 100_000, "nested too deeply"),
            ('{"a":' * 100_000, "nested too deeply"),
            ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
            ('{"schema": NaN}', "NaN is not a number"),
            ('{"stages": Infinity}', "Infinity is not a number"),
            ('{"schema": "bapipe.schedule/2"}', "has schema 'bapipe.schedule/2'.*make it again"),
            ('{"schema": "bapipe.plan/1"}', "expected 'bapipe.schedule/1'; it is a plan, give a schedule here"),
            ('{"schema": ["bapipe.schedule/1"]}', "expected 'bapipe.schedule/1'"),
            ('{"schema": "bapipe.schedule/1", "stages": 1' + "0" * 5000 + "}", "limit"),
            ("{" * 10, "not valid JSON"),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_text(self, tmp_path: Path, text: str, message: str) -> None:
        assert re.search(message, refused(tmp_path / "s.json", text, kind=FileFormatError))

    @pytest.mark.parametrize("byte", [b"x", b"\x00", b"[", b"9", b"\xff", b'"'])
    def test_ten_megabytes_of_one_byte(self, tmp_path: Path, byte: bytes) -> None:
        refused(tmp_path / "s.json", byte * 10_000_000, kind=FileFormatError)

    def test_binary(self, tmp_path: Path) -> None:
        assert "not text in UTF-8" in refused(tmp_path / "s.json", bytes(range(256)) * 100, kind=FileFormatError)

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        text = json.dumps(good())
        for length in range(0, len(text) - 1, 7):
            refused(tmp_path / "s.json", text[:length], kind=FileFormatError)

    def test_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bapipe.io.files.SIZE_LIMIT", 100)
        assert "over the limit of 100" in refused(tmp_path / "s.json", json.dumps(good()))

    def test_folder_and_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match="is a folder; name a file"):
            read_schedule(tmp_path)
        with pytest.raises(FileFormatError, match=r"there is no file .*; check the path"):
            read_schedule(tmp_path / "none.json")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"stages": 0}, "stages must lie between 1 and 10000, got 0"),
            ({"stages": -1}, "stages must lie between"),
            ({"stages": 10**12}, "stages must lie between"),
            ({"stages": 2.5}, "stages: expected a whole number; got 2.5"),
            ({"stages": True}, "stages: expected a whole number; got True"),
            ({"stages": "2"}, "stages: expected a whole number"),
            ({"stages": None}, "stages: expected a whole number"),
            ({"microbatches": 0}, "microbatches must lie between"),
            ({"microbatches": 10**9}, "microbatches must lie between"),
            ({"microbatches": 1_000_000}, "need at least 4000000 actions, got 4; is the file cut off"),
            ({"stages": 3}, "placement must list the ranks of each of 3 stages, got 2"),
            ({"placement": [[0], []]}, "placement must list"),
            ({"placement": [[0], [2]]}, "ranks must be 0 to 1 without a gap"),
            ({"placement": [[0], [-1]]}, "ranks must be"),
            ({"placement": [[0], [10**30]]}, "a whole number within 64 bits"),
            ({"placement": [0, 1]}, r"placement\[0\]: expected a list; got 0"),
            ({"placement": {}}, "placement: expected a list"),
            ({"caps": [1]}, "caps must be 2 numbers of at least 1"),
            ({"caps": [0, 1]}, "caps must be 2 numbers of at least 1"),
            ({"weight_versions": [1, -1]}, "weight_versions must be 2 numbers of at least 1"),
            ({"sending": "cut-trough"}, "sending: must be one of .*did you mean 'cut-through'"),
            ({"concurrency": "both"}, "concurrency: must be one of"),
            ({"flushes": 1}, "flushes: expected true or false"),
            ({"lanes": [{"rank": 5, "actions": []}]}, "a lane belongs to rank 5, which has no stage"),
            ({"lanes": [{"rank": 0, "actions": ["0F0", "9F0"]}]}, "rank 0: 9F0 is outside 2 stages"),
            ({"lanes": [{"rank": 0, "actions": ["0F7"]}]}, "rank 0: 0F7 is outside"),
            ({"lanes": [{"rank": 0, "actions": ["0X0"]}]}, "an action looks like 2F0"),
            ({"lanes": [{"rank": 0, "actions": ["9" * 99]}]}, "an action looks like 2F0"),
            ({"lanes": [{"rank": 0, "actions": [0]}]}, "expected a text; got 0"),
            ({"lanes": [{"rank": 0}]}, "'actions' is missing; add it"),
            ({"lanes": [{"rnk": 0, "actions": []}]}, "unknown key 'rnk' .*did you mean 'rank'"),
            ({"lane": []}, "unknown key 'lane' .*did you mean 'lanes'"),
            ({"x" * 1000: 1}, "unknown key 'xxx"),
            ({"name": 3}, "name: expected a text"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_values(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        text = json.dumps({**good(), **changes})
        assert re.search(message, refused(tmp_path / "s.json", text)), refused(tmp_path / "s.json", text)

    def test_a_large_good_file_is_read(self, tmp_path: Path) -> None:
        """Half a megabyte of orders is ordinary."""
        schedule = make_schedule("1f1b-sno", 16, 512)
        write_schedule(schedule, tmp_path / "s.json")
        assert read_schedule(tmp_path / "s.json") == schedule


class TestHostileCsv:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no actions; give one row"),
            (",,,\n", "no actions"),
            ("hello\n", "an action looks like 2F0"),
            ("0F0,0B0,\x00\n", "an action looks like|not torch's schedule CSV"),
            ("9999999F0\n", "stage 0 has no actions|stages must lie"),
            ("0F999999999,0B0\n", "microbatches must lie"),
            ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1; keep it on one"),
            ("0F0,0B0\n2F0,2B0\n", "stage 1 has no actions; add its row"),
            ('"' + "x" * 200_000, "not torch's schedule CSV|an action looks like"),
        ],
        ids=lambda value: repr(value)[:24],
    )
    def test_text(self, tmp_path: Path, text: str, message: str) -> None:
        assert re.search(message, refused(tmp_path / "s.csv", text))

    @pytest.mark.parametrize("byte", [b"x", b",", b"\n", b'"', b"\x00", b"0"])
    def test_ten_megabytes_of_one_byte(self, tmp_path: Path, byte: bytes) -> None:
        refused(tmp_path / "s.csv", byte * 10_000_000)


def test_reading_does_not_judge_the_logic(tmp_path: Path) -> None:
    """A file may hold a wrong order; saying so is the checker's work, with the table."""
    data = good()
    data["lanes"][0]["actions"] = ["0B0", "0F0"]
    (tmp_path / "s.json").write_text(json.dumps(data))
    schedule: Schedule = read_schedule(tmp_path / "s.json")
    assert [problem.message for problem in check(schedule)] == ["rank 0: 0B0 runs before 0F0; put 0F0 ahead of it"]
    assert dataclasses.replace(schedule) == schedule
