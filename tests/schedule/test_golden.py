"""Every row of tests/data/golden_schedules.json, exactly, from Python and from the command."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from click.testing import CliRunner

from bapipe.cli import cli
from bapipe.schedule.actions import Schedule
from bapipe.schedule.closed_forms import paper_table_row
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline
from paths import REPOSITORY

ROWS: list[dict[str, Any]] = json.loads(
    (REPOSITORY / "tests" / "data" / "golden_schedules.json").read_text(encoding="utf-8")
)
NAMES = {"SNO": "1f1b-sno", "SO": "1f1b-so", "SO1": "1f1b", "GPipe": "gpipe", "BLK": "1f1b-sno"}
LATENCY, BLOCKING = Network(latency_only=True), Network(sending="blocking")


def label(row: dict[str, Any]) -> str:
    return ",".join(str(row[name]) for name in ("N", "M", "F", "B", "SR"))


def costs(row: dict[str, Any], *, transfers: bool = True) -> Costs:
    return Costs.of(row["N"], forward=row["F"], backward=row["B"], transfer=row["SR"] if transfers else 0)


def schedule(row: dict[str, Any], key: str) -> Schedule:
    name = NAMES[key]
    lean = [2 * (row["N"] - i) + 1 for i in range(1, row["N"] + 1)] if name == "1f1b" else None
    return make_schedule(name, row["N"], row["M"], caps=lean)


def timeline(row: dict[str, Any], key: str) -> Timeline:
    """The timeline that a key of the golden file stands for."""
    if key in ("AS", "FBP"):  # these columns leave transfers out, as the paper does
        return simulate(
            make_schedule(f"{'1f1b' if key == 'AS' else 'fbp'}-as", row["N"], row["M"]),
            costs(row, transfers=False),
        )
    base, _, latency = key.partition("_")
    network = BLOCKING if key == "BLK" else LATENCY if latency else None
    return simulate(schedule(row, base), costs(row), network)


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_times(row: dict[str, Any]) -> None:
    paper = {"paperSNO": "1f1b-sno", "paperSO": "1f1b-so"}
    sizes = [row[name] for name in ("N", "M", "F", "B", "SR")]
    got: dict[str, object] = {}
    for key in row["T"]:
        if key in paper:
            got[key] = paper_table_row(paper[key], *sizes)["time"]
        elif key == "PDperiod":
            period = simulate(make_schedule("pipedream", row["N"], row["M"]), costs(row)).period
            assert period == pytest.approx(float(Fraction(row["T"][key])), rel=1e-15)
            got[key] = row["T"][key]
        else:
            got[key] = timeline(row, key).time
    assert got == row["T"]


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_bubbles(row: dict[str, Any]) -> None:
    for key, bubble in row["bubble"].items():
        drawn = timeline(row, key)
        work = row["M"] * (row["F"] + row["B"])
        assert 1 - Fraction(work) / Fraction(drawn.time) == Fraction(bubble), key
        assert drawn.bubble == pytest.approx(float(Fraction(bubble)), abs=1e-15), key


@pytest.mark.parametrize(
    ("row", "one_f_one_b", "fbp"),
    [(ROWS[-2], 640, 590), (ROWS[-1], 1485, 1095)],
    ids=["4,16,10,20,15", "8,32,10,15,20"],
)
def test_cut_through_past_full_overlap(row: dict[str, Any], one_f_one_b: int, fbp: int) -> None:
    """With SR > min(F, B) transfers no longer hide, and the paper's column for AS and FBP is too low."""
    assert simulate(make_schedule("1f1b-as", row["N"], row["M"]), costs(row)).time == one_f_one_b
    assert simulate(make_schedule("fbp-as", row["N"], row["M"]), costs(row)).time == fbp


COMMAND = {
    "AS": ["1f1b-as", "--transfer", "0"],
    "FBP": ["fbp-as", "--transfer", "0"],
    "SNO": ["1f1b-sno"],
    "SO": ["1f1b-so"],
    "GPipe": ["gpipe"],
    "SNO_lat": ["1f1b-sno", "--links", "latency"],
    "GPipe_lat": ["gpipe", "--links", "latency"],
    "BLK": ["1f1b-sno", "--links", "blocking"],
}


@pytest.mark.parametrize("row", [ROWS[0], ROWS[3], ROWS[9], ROWS[-1]], ids=label)
@pytest.mark.parametrize("key", COMMAND)
def test_command(row: dict[str, Any], key: str) -> None:
    name, *options = COMMAND[key]
    sizes = ["--stages", row["N"], "--microbatches", row["M"], "--forward", row["F"], "--backward", row["B"]]
    arguments = ["simulate", name, *sizes, "--transfer", row["SR"], *options, "--json"]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    printed = json.loads(result.stdout)
    assert printed["time"] == row["T"][key]
    if key in row["bubble"]:
        assert printed["bubble"] == pytest.approx(float(Fraction(row["bubble"][key])), abs=1e-15)


@pytest.mark.parametrize("row", [ROWS[3], ROWS[9]], ids=label)
def test_command_compares_all(row: dict[str, Any]) -> None:
    sizes = ["--stages", row["N"], "--microbatches", row["M"], "--forward", row["F"], "--backward", row["B"]]
    arguments = ["simulate", "all", *sizes, "--transfer", row["SR"], "--json"]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    times = {entry["schedule"]: entry["time"] for entry in json.loads(result.stdout)["schedules"]}
    for key, name in (
        ("SNO", "1f1b-sno"),
        ("SO", "1f1b-so"),
        ("SO1", "1f1b"),
        ("GPipe", "gpipe"),
        ("AS", "1f1b-as"),
    ):
        assert times[name] == row["T"][key]
    assert times["pipedream"] == pytest.approx(row["M"] * float(Fraction(row["T"]["PDperiod"])))
