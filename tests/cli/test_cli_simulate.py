"""The real `bapipe simulate`, in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bapipe import __version__
from bapipe.schedule.generators import SCHEDULES, make_schedule
from bapipe.schedule.schedule_file import read_schedule, write_schedule
from command import bapipe

BAPIPE = Path(sys.executable).with_name("bapipe")
SIZES = ["--stages", "4", "--micro-batches", "8"]
COSTS = ["--forward", "10", "--backward", "20", "--transfer", "5"]


def run(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return bapipe(*arguments, folder=folder, **{"COLUMNS": "100", "NO_COLOR": "1", **variables})


def printed(*arguments: str, folder: Path | None = None) -> str:
    """What a command prints that ends well and complains of nothing."""
    result = run(*arguments, folder=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


BAD = {
    "zero forward": [*SIZES, "--forward", "0", "--backward", "20"],
    "negative forward": [*SIZES, "--forward", "-1", "--backward", "20"],
    "one zero of four": [*SIZES, "--forward", "1,1,0,1", "--backward", "20"],
    "zero backward": [*SIZES, "--forward", "10", "--backward", "0"],
    "negative backward": [*SIZES, "--forward", "10", "--backward=-20"],
    "negative transfer": [*SIZES, "--forward", "10", "--backward", "20", "--transfer=-5"],
    "nan": [*SIZES, "--forward", "nan", "--backward", "20"],
    "inf": [*SIZES, "--forward", "10", "--backward", "inf"],
    "beyond floats": [*SIZES, "--forward", "1e999", "--backward", "20"],
    "absurd unit": [*SIZES, "--forward", "1e300", "--backward", "1e300"],
    "words": [*SIZES, "--forward", "ten", "--backward", "20"],
    "empty": [*SIZES, "--forward", "", "--backward", "20"],
    "no stages": ["--stages", "0", "--micro-batches", "8", *COSTS],
    "negative stages": ["--stages", "-2", "--micro-batches", "8", *COSTS],
    "no micro-batches": ["--stages", "4", "--micro-batches", "0", *COSTS],
    "half a stage": ["--stages", "1.5", "--micro-batches", "8", *COSTS],
    "stages left out": ["--micro-batches", "8", *COSTS],
    "too many stages": ["--stages", "1000000", "--micro-batches", "1", *COSTS],
    "too many micro-batches": ["--stages", "4", "--micro-batches", "99999999999", *COSTS],
    "three forwards for four stages": [*SIZES, "--forward", "1,2,3", "--backward", "20"],
    "four transfers for three links": [*SIZES, "--forward", "1", "--backward", "2", "--transfer", "1,2,3,4"],
    "weight gradient over backward": [*SIZES, *COSTS, "--weight-gradient", "30"],
    "cap for another schedule": [*SIZES, *COSTS, "--in-flight", "4,3,2,1"],
    "replicas of nothing": [*SIZES, *COSTS, "--replicas", "0,1,1,1"],
    "absurd replicas": [*SIZES, *COSTS, "--replicas", "999999999999,1,1,1"],
    "unknown option": [*SIZES, *COSTS, "--colour"],
    "unknown links": [*SIZES, *COSTS, "--links", "fast"],
    "folder that is not there": [*SIZES, *COSTS, "--svg", "missing/t.svg"],
}
MESSAGES = {
    "zero forward": "forward time must be a finite number of more than 0, got 0",
    "negative transfer": "transfer time must be a finite number of at least 0, got -5",
    "no stages": "a pipeline needs at least 1 stage, got 0; raise --stages",
    "no micro-batches": "a global batch needs at least 1 micro-batch, got 0; raise --micro-batches",
    "stages left out": "--stages is missing",
    "three forwards for four stages": "forward time: 4 stages need one value or 4, got 3",
    "unknown option": "No such option",
    "folder that is not there": "missing/t.svg cannot be written",
}


def require_refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Exit code 2, one line on stderr, no traceback, nothing on stdout."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("bapipe: ")
    assert len(result.stderr) < 600
    return result.stderr


@pytest.mark.parametrize("case", BAD)
def test_bad_values(case: str, tmp_path: Path) -> None:
    files = ["--svg", "t.svg", "--trace", "t.json", "--out", "o.json"]
    arguments = BAD[case] if "--svg" in BAD[case] else [*BAD[case], *files]
    error = require_refusal(run("simulate", "1f1b-so", *arguments, folder=tmp_path))
    assert MESSAGES.get(case, "") in error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("1f1b-s0", "did you mean '1f1b-so'?"),
        ("GPipe", "did you mean 'gpipe'?"),
        ("zbh1", "did you mean 'zb-h1'?"),
    ],
)
def test_unknown_schedule(name: str, suggestion: str, tmp_path: Path) -> None:
    error = require_refusal(run("simulate", name, *SIZES, *COSTS, "--out", "o.json", folder=tmp_path))
    assert f"unknown schedule '{name}'" in error
    assert suggestion in error
    assert os.listdir(tmp_path) == []


HOSTILE = {
    "10 MB of x": b"x" * 10_000_000,
    "10 MB of [": b"[" * 10_000_000,
    "deep nesting": b'{"a":' * 100_000,
    "NaN": b'{"schema": "bapipe.schedule/1", "stages": NaN}',
    "cut off": b'{"schema": "bapipe.schedule/1", "name": "x", "sta',
    "binary": bytes(range(256)) * 1000,
    "another schema": b'{"schema": "bapipe.plan/1"}',
    "huge": b'{"schema": "bapipe.schedule/1", "name": "x", "stages": 9999999999, "microbatches": 1, '
    b'"placement": [], "lanes": []}',
    "empty": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("ending", ["json", "csv"])
def test_hostile_files(case: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / f"s.{ending}").write_bytes(HOSTILE[case])
    command = ["simulate", f"s.{ending}", "--forward", "1", "--backward", "1", "--svg", "t.svg"]
    require_refusal(run(*command, folder=tmp_path))
    assert os.listdir(tmp_path) == [f"s.{ending}"]


def test_missing_file(tmp_path: Path) -> None:
    error = require_refusal(run("simulate", "none.json", "--forward", "1", "--backward", "1", folder=tmp_path))
    assert "there is no file none.json; check the path" in error


def test_sizes_that_contradict_the_file(tmp_path: Path) -> None:
    write_schedule(make_schedule("gpipe", 2, 3), tmp_path / "s.json")
    command = ["simulate", "s.json", "--stages", "4", "--forward", "1", "--backward", "1"]
    assert "s.json has 2 stages, but --stages says 4" in require_refusal(run(*command, folder=tmp_path))


def test_wrong_order_in_a_file_shows_the_table(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    result = run("simulate", "s.csv", "--forward", "1", "--backward", "1", folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("bapipe: rank 0: 0B0 waits for ever (deadlock")
    assert lines[1:] == ["rank 0      0F0   [0B0]   0F1    0B1", "rank 1      1F0    1F1    1B0    1B1"]


class TestHelp:
    def test_version(self) -> None:
        assert printed("--version") == f"bapipe, version {__version__}\n"

    def test_help_has_examples_and_completion(self) -> None:
        text = printed("--help")
        assert "Examples:" in text
        assert "bapipe simulate all --stages 4" in text
        assert "_BAPIPE_COMPLETE=bash_source" in text

    def test_help_of_simulate_has_examples(self) -> None:
        text = printed("simulate", "--help")
        assert "bapipe simulate 1f1b -n 4 -m 16 --in-flight 7,5,3,1" in text
        for name in SCHEDULES:
            assert name in text

    def test_completion(self) -> None:
        result = run(_BAPIPE_COMPLETE="bash_source")
        assert result.returncode == 0
        assert "complete" in result.stdout


class TestOutput:
    def test_json_has_the_promised_keys(self) -> None:
        got = json.loads(printed("simulate", "1f1b-sno", *SIZES, *COSTS, "--json"))
        assert got["time"] == 410
        assert got["bubble"] == pytest.approx(1 - 240 / 410)
        assert got["peak_activations"] == [4, 3, 2, 1]
        assert got["bandwidth_demand"] == pytest.approx(0.1)
        assert got["weights_memory"] == [2, 2, 2, 2]
        assert got["closed_form"] == 410
        assert got["closed_form_valid"] is True

    def test_closed_form_is_null_where_there_is_none(self) -> None:
        got = json.loads(printed("simulate", "gpipe", *SIZES, "--forward", "1,2,3,4", "--backward", "5", "--json"))
        assert got["closed_form"] is None
        assert got["closed_form_valid"] is False

    def test_text(self) -> None:
        text = printed("simulate", "1f1b-sno", *SIZES, *COSTS)
        lines = text.splitlines()
        assert lines[0] == "1f1b-sno, 4 stages, 8 micro-batches"
        assert lines[1].startswith("rank 0 │F")
        assert any(line.split() == ["time", "410"] for line in lines)
        assert "\x1b" not in text
        assert max(map(len, lines)) <= 100

    def test_all_compares_every_schedule(self) -> None:
        got = json.loads(printed("simulate", "all", *SIZES, *COSTS, "--json"))
        assert [entry["schedule"] for entry in got["schedules"]] == [
            "gpipe",
            "1f1b-sno",
            "1f1b-so",
            "1f1b",
            "1f1b-as",
            "fbp-as",
            "pipedream",
            "interleaved",
            "zb-h1",
            "zb-h2",
            "zb-v",
            "v-half",
            "v-min",
            "dualpipe-v",
            "zb",
        ]
        text = printed("simulate", "all", *SIZES, *COSTS)
        assert all(name in text for name in SCHEDULES)
        assert "1f1b (least" in text
        assert "zb (least" in text

    def test_all_with_blocking_sends_leaves_out_what_cannot_run(self) -> None:
        text = printed("simulate", "all", *SIZES, *COSTS, "--links", "blocking")
        assert "Left out" in text
        got = json.loads(printed("simulate", "all", *SIZES, *COSTS, "--links", "blocking", "--json"))
        assert "interleaved" not in {entry["schedule"] for entry in got["schedules"]}

    def test_all_draws_nothing(self, tmp_path: Path) -> None:
        error = require_refusal(run("simulate", "all", *SIZES, *COSTS, "--svg", "t.svg", folder=tmp_path))
        assert "name one schedule to write a file" in error
        assert os.listdir(tmp_path) == []

    def test_slot_rule_is_said(self) -> None:
        assert "slot rule                    table" in printed("simulate", "fbp-as", *SIZES, *COSTS)
        static = json.loads(printed("simulate", "fbp-as", *SIZES, *COSTS, "--slots", "static", "--json"))
        assert static["slots"] == "static"
        assert static["time"] == (8 + 2 * 4 - 1) * 30

    def test_closed_pipe_is_no_traceback(self) -> None:
        command = f"'{BAPIPE}' simulate all -n 4 -m 8 --forward 1 --backward 2 | head -c 1"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
        assert "Traceback" not in result.stderr


class TestFiles:
    def test_svg_trace_and_orders(self, tmp_path: Path) -> None:
        options = ["--svg", "t.svg", "--trace", "t.json", "--out", "o.json"]
        text = printed("simulate", "1f1b-so", *SIZES, *COSTS, *options, folder=tmp_path)
        for name in ("t.svg", "t.json", "o.json"):
            assert f"wrote {name}" in text
        assert sorted(os.listdir(tmp_path)) == ["o.json", "t.json", "t.svg"]
        assert ElementTree.parse(tmp_path / "t.svg").getroot().tag.endswith("svg")
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        assert read_schedule(tmp_path / "o.json") == make_schedule("1f1b-so", 4, 8)

    def test_json_and_files_at_once(self, tmp_path: Path) -> None:
        text = printed("simulate", "gpipe", *SIZES, *COSTS, "--json", "--svg", "t.svg", folder=tmp_path)
        assert json.loads(text)["schedule"] == "gpipe"
        assert os.listdir(tmp_path) == ["t.svg"]

    @pytest.mark.parametrize("ending", ["json", "csv"])
    def test_a_written_schedule_can_be_simulated(self, ending: str, tmp_path: Path) -> None:
        first = printed("simulate", "zb-h1", *SIZES, *COSTS, "--out", f"mine.{ending}", "--json", folder=tmp_path)
        again = printed("simulate", f"mine.{ending}", *COSTS, "--json", folder=tmp_path)
        assert json.loads(again)["time"] == json.loads(first)["time"]

    def test_interleaved_costs_are_per_accelerator(self, tmp_path: Path) -> None:
        first = printed("simulate", "interleaved", *SIZES, *COSTS, "--out", "mine.csv", "--json", folder=tmp_path)
        again = printed("simulate", "mine.csv", *COSTS, "--json", folder=tmp_path)
        assert json.loads(again)["time"] == json.loads(first)["time"]
        rows = list(csv.reader((tmp_path / "mine.csv").read_text().splitlines()))
        assert len(rows) == 4

    def test_what_the_csv_cannot_hold_writes_nothing(self, tmp_path: Path) -> None:
        command = ["simulate", "fbp-as", *SIZES, *COSTS, "--svg", "t.svg", "--out", "o.csv"]
        assert "one lane per rank" in require_refusal(run(*command, folder=tmp_path))
        assert os.listdir(tmp_path) == []

    def test_an_old_file_survives_bad_input(self, tmp_path: Path) -> None:
        (tmp_path / "t.svg").write_text("old")
        bad = ["--stages", "0", "--micro-batches", "8"]
        require_refusal(run("simulate", "gpipe", *bad, *COSTS, "--svg", "t.svg", folder=tmp_path))
        assert (tmp_path / "t.svg").read_text() == "old"


@pytest.mark.parametrize("arguments", [["1f1b-so"], ["1f1b-so", "--json"], ["all"], ["fbp-as", "--svg", "t.svg"]])
def test_a_small_simulation_loads_neither_torch_nor_numba(arguments: list[str], tmp_path: Path) -> None:
    """torch takes seconds to load and numba half a second; neither is needed here."""
    program = (
        "import sys\n"
        "from bapipe.cli import cli\n"
        f"cli.main({['simulate', *arguments, *SIZES, *COSTS]!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'numba' not in sys.modules, 'numba'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
